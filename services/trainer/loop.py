"""Runs the training loop: pull a batch, train on the batch, publish the new version.

    apply commands -> pull (every rank its share) -> agree -> train -> publish -> begin a checkpoint, if due

A checkpoint is copied between two steps and written while the next ones are trained; it counts, and is reported, when it is
durable.

Invariants: training starts only when every rank holds its share of the same batch. All ranks apply the orchestrator's
commands alike, between training steps only. Other ranks wait for the first in a bounded collective.

Recovery: the loop starts from the newest undamaged checkpoint, and trains the recorded batches up to the ledger's newest
version again without publishing. Then the loop offers that version once more (bit-equal arithmetic gives the same
digest, and the ledger takes the new address), and the run continues. The loop skips a recorded batch that is damaged in
the journal: the weights then differ from the ledger's newest version, as after arithmetic that is not bit-equal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import structlog
import torch

from services.common.checkpoints import CheckpointGauge
from services.common.errors import BatchLostError, ModelMismatchError, RollmillError, VersionConflictError
from services.common.records import Interval, RankBatch
from services.common.system.parking import Parked, return_freed_memory
from services.common.telemetry.accounts import ActivityName
from services.common.telemetry.logs import LogEvent
from services.trainer.checkpoints import CheckpointFailedError, Checkpoints
from services.trainer.link import GrpcLink
from services.trainer.numerics import MismatchError, NumericsGate
from services.trainer.publish import Snapshots
from services.trainer.ranks import Ranks
from services.trainer.step import TrainStep

# --- Carries out device turns in a trainer, between two training steps: parks the trainer's tensors of the device, or
# brings them back.


log = structlog.get_logger()
COMMAND_POLL_S = 0.2  # between two looks at the orchestrator's commands
LAST_TURN_S = 120.0  # for the last checkpoint and the export, after a command to stop; without it a resumed run replays


class DeviceTurns:
    """The device of one rank, held at the begin. Every method is a collective."""

    def __init__(self, step: TrainStep, link: GrpcLink, ranks: Ranks, directory: Path, *, first: int = 0) -> None:
        """``directory`` takes the file of parked tensors of the host; ``first`` is the number of the turn that has begun."""
        self._step = step
        self._link = link
        self._ranks = ranks
        self._directory = directory
        self._done = first
        self._parked: Parked | None = None
        self.before_free: Callable[[], object] = lambda: None  # called on every rank

    @property
    def is_held(self) -> bool:
        return self._parked is None

    def follow(self) -> bool:
        """Carry out the newest turn; returns whether the device is held now. Raises ``OSError``: no room for the file."""
        turn = self._link.device_turn
        number, yours = self._ranks.max(turn.number, turn.yours)
        if number == self._done:
            return self.is_held
        began = time.monotonic()
        if yours and self._parked is not None:
            self._parked.restore()
            self._parked = None
        elif not yours and self._parked is None:
            self.before_free()
            self._parked = Parked(self._tensors(), self._directory)
            return_freed_memory()
        self._ranks.max(0)  # every rank has done so
        self._done = number
        log.info("device.held" if yours else "device.freed", seconds=round(time.monotonic() - began, 3))
        if self._ranks.is_first:
            self._link.set_device_turn(number)
        return self.is_held

    def wait_for_last(self) -> bool:
        """Wait for a turn after a command to stop, at most LAST_TURN_S; returns whether the device is held.

        A process that must leave because of a signal does not wait.
        """
        end = time.monotonic() + LAST_TURN_S
        while not self.follow():
            if self._ranks.max(self._link.leaving or time.monotonic() > end)[0]:
                log.warning(
                    "device.not_held", effect="no checkpoint of the last steps: a resumed run trains them again"
                )
                return False
            time.sleep(COMMAND_POLL_S)
        return True

    def _tensors(self) -> Iterator[torch.Tensor]:
        """What this rank has on its device between two steps."""
        step, kind = self._step, self._ranks.device.type
        frozen = [model for model in (step.reference, step.teacher) if isinstance(model, torch.nn.Module)]
        for module in (step.model, *frozen):
            yield from (tensor for tensor in (*module.parameters(), *module.buffers()) if tensor.device.type == kind)
        for state in step.optimizer.adamw.state.values():
            yield from (tensor for tensor in state.values() if tensor.device.type == kind)


_GO, _PAUSE, _STOP = 0, 1, 2


class _LostBatch:
    """Replaces a recorded batch that the journal has lost."""


class CannotReplayError(RollmillError):
    """Newer checkpoints are damaged, and recorded batches since the newest undamaged one are missing."""


class TrainingLoop:
    """Orders pulling, training, publishing and checkpoints."""

    def __init__(
        self,
        *,
        step: TrainStep,
        link: GrpcLink,
        publisher: Snapshots,
        checkpoints: Checkpoints,
        ranks: Ranks,
        device: DeviceTurns | None,
        num_steps: int,
        checkpoint_every: int,
        gate: NumericsGate | None = None,
    ) -> None:
        """``device``: the turns on a device that is shared with the rollouts; None for a device of the trainer's own. ``gate``
        may refuse a batch by a ``MismatchError``; replayed batches are not checked."""
        self._step = step
        self._link = link
        self._publisher = publisher
        self._checkpoints = checkpoints
        self._ranks = ranks
        self._device = device
        if device is not None and ranks.device.type == "cpu":  # whose memory the copy of a checkpoint is
            device.before_free = self._collect_checkpoint
        self._num_steps = num_steps
        self._checkpoint_every = checkpoint_every
        self._gate = gate
        self._saved = self._durable = 0  # training steps of the last checkpoint, begun and complete
        self._checkpoint_due = False
        self._checkpoint_asked = False  # when none could be written
        self._waited_s = 0.0
        self.failed_checkpoints = 0
        self.steps_not_replayed = 0

    def recover(self, checkpoint_step: int, newest_version: int) -> int:
        """Replay up to the ledger's newest version and offer that version again; returns the last training step done.

        ``newest_version`` is -1 before the first publication: then the loop publishes version 0.

        Raises:
            ModelMismatchError: the checkpoint is ahead of the ledger, so the checkpoint belongs to another history.
            CannotReplayError: newer checkpoints were damaged, and the journal lacks a batch of the steps to replay.
        """
        # One step ahead is legal: the process had to leave between the updates of a step and their publication.
        if checkpoint_step > newest_version + 1:
            raise ModelMismatchError(
                f"the checkpoint of step {checkpoint_step} is ahead of the ledger, whose newest version is "
                f"{newest_version}: it belongs to another history; remove it, or bring its journal back"
            )
        self._saved = self._durable = checkpoint_step
        self._report_checkpoints()
        self._link.set_gauge(CheckpointGauge.DAMAGED.value, len(self._checkpoints.set_aside()))
        for training_step in range(checkpoint_step + 1, newest_version + 1):
            batch = self._next_batch(training_step, ActivityName.REPLAYING)
            if batch is None:
                return training_step - 1  # stopped while replaying
            if isinstance(batch, _LostBatch):
                if set_aside := self._checkpoints.set_aside(checkpoint_step):
                    raise _cannot_replay(checkpoint_step, training_step, newest_version, set_aside)
                # From here on the weights differ from the ledger's newest version, which replicas keep until the next.
                self.steps_not_replayed += 1
                self._link.set_gauge("steps_not_replayed", self.steps_not_replayed)
                log.error("step.not_replayed", step=training_step, newest_version=newest_version)
                continue
            self._step.run(batch)
            log.info(LogEvent.STEP_REPLAYED, step=training_step, newest_version=newest_version)
        done = max(checkpoint_step, newest_version, 0)
        self._link.set_state(ActivityName.PUBLISHING, done)
        self._publish(done, {}, [])
        return done

    def run(self, done: int) -> int:
        """Train until the last step or a command to leave; returns the last training step done."""
        while done < self._num_steps:
            batch = self._next_batch(done + 1, ActivityName.WAITING_FOR_BATCH)
            if not isinstance(batch, RankBatch):
                break
            try:
                self._train(batch)
            except MismatchError as error:
                # A person has to end the run. No deadline: the batch is recorded, so another try would find the same.
                self._link.set_state(ActivityName.PAUSED, done + 1)
                self._link.refuse(error.message)
                while self._agreed_command() != _STOP:
                    self._follow_turns()
                    time.sleep(COMMAND_POLL_S)
                break
            done += 1
            if done % self._checkpoint_every == 0 or done == self._num_steps:
                self._checkpoint_due = True
            self._checkpoint_if_due(done)
        self._link.set_state(ActivityName.CHECKPOINTING, done)
        for _ in range(2):  # no step follows that could try again
            if done != self._saved and (self._device is None or self._device.wait_for_last()):
                self._begin_checkpoint(done)
            if self._collect_checkpoint():
                break
        return done

    def wait_for_stop(self, done: int) -> None:
        """Wait until the orchestrator ends the run, so that replicas can fetch the last version.

        No deadline: an end evaluation may take any time, and the lease is renewed meanwhile.
        """
        self._link.set_state(ActivityName.FINISHED, done)
        while self._agreed_command() != _STOP:
            self._follow_turns()
            time.sleep(COMMAND_POLL_S)

    def _train(self, batch: RankBatch) -> None:
        self._link.set_state(ActivityName.TRAINING, batch.training_step)
        started = time.time()
        metrics = self._step.run(batch, self._gate.check if self._gate is not None and self._gate.left else None)
        finished = time.time()
        log.info(
            "step.done",
            step=batch.training_step,
            loss=round(metrics.loss, 5),
            grad_norm=round(metrics.grad_norm, 4),
            mismatch_abs=round(metrics.mismatch_abs, 6),
            seconds=round(finished - started, 3),
        )
        self._link.set_gauge("step_seconds", metrics.seconds)
        self._link.set_gauge("tokens_per_second", metrics.tokens_per_second)
        self._link.set_gauge("memory_peak_gib", metrics.memory_peak_gib)
        if metrics.mfu is not None:
            self._link.set_gauge("mfu", metrics.mfu)
        self._link.set_state(ActivityName.PUBLISHING, batch.training_step)
        flat = {name: float(value) for name, value in metrics.as_dict().items()}
        self._publish(batch.training_step, flat, [(started, finished)])

    def _publish(self, version: int, metrics: Mapping[str, float], intervals: Sequence[Interval]) -> None:
        published = self._publisher.publish(version)
        if published is None:
            return
        try:
            self._link.publish(published.version, {**metrics, **published.metrics}, intervals)
        except VersionConflictError as error:
            # Replayed arithmetic was not bit-equal (a GPU): replicas keep the version they hold. Here that version has
            # another digest, so the publisher sends the next one in full.
            log.warning(LogEvent.VERSION_DIFFERS, version=version, error=error.message)

    def _next_batch(self, training_step: int, state: ActivityName) -> RankBatch | _LostBatch | None:
        """Wait until every rank holds its share of the step's batch.

        Returns None on a command to leave, and ``_LostBatch`` for a recorded batch that the journal has lost (only while
        replaying). The first rank, which gets the commands, waits for the batch. The others ask after the batch exists and
        is recorded, so that none waits for a batch that a pause or a stop cancels.
        """
        while True:
            command = self._agreed_command()
            if command == _STOP:
                return None
            held = self._follow_turns()
            if command == _PAUSE:
                self._link.set_state(ActivityName.PAUSED, training_step)
                time.sleep(COMMAND_POLL_S)
                continue
            if state == ActivityName.REPLAYING or not held:
                self._checkpoint_asked |= self._link.take_checkpoint_command()  # after the replay, or in the next turn
            else:
                self._checkpoint_if_due(training_step - 1, again=False)
            self._link.set_state(state, training_step)
            began = time.monotonic()
            batch: RankBatch | _LostBatch | None = None
            if self._ranks.is_first:
                try:
                    batch = self._link.pull(training_step)
                except BatchLostError as error:
                    if state != ActivityName.REPLAYING:  # else its version exists already
                        raise
                    log.warning("batch.lost", step=training_step, error=error.message)
                    batch = _LostBatch()
            holding = self._num_holding(batch)
            if holding < 0:
                return _LostBatch()
            all_hold = False
            if holding == 1:
                if not self._ranks.is_first:
                    batch = self._link.pull(training_step)
                all_hold = self._num_holding(batch) == self._ranks.world_size and self._follow_turns()
            self._waited_s += time.monotonic() - began
            self._link.set_gauge("waited_s", self._waited_s)
            if all_hold:
                return batch

    def _follow_turns(self) -> bool:
        """Carry out the newest turn on a shared device; returns whether the device is held."""
        return self._device is None or self._device.follow()

    def _num_holding(self, batch: RankBatch | _LostBatch | None) -> int:
        """Number of ranks that hold the batch; negative for a lost batch."""
        held = -1 if isinstance(batch, _LostBatch) else int(batch is not None)
        return int(self._ranks.sum(torch.tensor(held, device=self._ranks.device)))

    def _agreed_command(self) -> int:
        command = _STOP if self._link.stopped else _PAUSE if self._link.paused else _GO
        return self._ranks.max(command)[0]

    def _checkpoint_if_due(self, done: int, *, again: bool = True) -> None:
        """Begin a checkpoint on a command, or (with ``again``) when one is due, such as after a failed one.

        The ranks learn at the same step that the one before has been written, or has failed.
        """
        asked = self._link.take_checkpoint_command() or self._checkpoint_asked or (again and self._checkpoint_due)
        self._checkpoint_asked = False
        any_asked, any_writing = self._ranks.max(asked, self._checkpoints.is_writing)
        if not any_writing:
            self._collect_checkpoint()
        if not any_asked:
            return
        if done == self._saved:
            self._checkpoint_due = False
            return
        self._link.set_state(ActivityName.CHECKPOINTING, done)
        self._collect_checkpoint()  # at most one copy of the state at a time
        self._begin_checkpoint(done)

    def _begin_checkpoint(self, done: int) -> None:
        self._checkpoint_due = False
        self._saved = done
        try:
            self._checkpoints.begin(done, self._step.model, self._step.optimizer, self._report_checkpoints)
        except CheckpointFailedError as error:
            self._checkpoint_failed(done, error)

    def _collect_checkpoint(self) -> bool:
        """Wait for the checkpoint that is being written. False when it has failed."""
        try:
            self._checkpoints.finish()
        except CheckpointFailedError as error:
            self._checkpoint_failed(self._saved, error)
            return False
        self._durable = self._saved
        return True

    def _report_checkpoints(self) -> None:
        """Called from the thread that writes: the loop may wait long for the next batch."""
        self._link.set_checkpoint_steps(self._checkpoints.kept())

    def _checkpoint_failed(self, training_step: int, error: CheckpointFailedError) -> None:
        """Training continues; the next step tries again. The journal keeps all batches since the last checkpoint."""
        self.failed_checkpoints += 1
        self._checkpoint_due = True
        self._saved = self._durable
        self._link.set_gauge(CheckpointGauge.FAILED.value, self.failed_checkpoints)
        log.error("checkpoint.failed", step=training_step, error=error.message, failures=self.failed_checkpoints)


def _cannot_replay(begun: int, training_step: int, newest_version: int, set_aside: Sequence[str]) -> CannotReplayError:
    begin = f"the checkpoint of step {begun}" if begun else "the initial model"
    return CannotReplayError(
        f"the run is at step {newest_version}; its newer checkpoints are damaged and were set aside "
        f"({'; '.join(set_aside)}). To continue from {begin}, the trainer needs the batch of step {training_step}, which "
        "the journal no longer has. Put an undamaged copy of a checkpoint back under its name and resume. Or start another "
        "run from undamaged weights: `rollmill checkpoints RUN` lists the state of each checkpoint, `rollmill export RUN "
        f"--step K` exports one. Or remove the directories that were set aside and resume: the run then continues from "
        f"{begin} without the steps of the lost batches"
    )
