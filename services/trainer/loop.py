"""The training loop: one batch, its updates, one published version, over and over.

    heed commands -> pull (every rank its share) -> agree -> train -> publish -> now and then a checkpoint

Invariant: nothing is computed before every rank holds its share of the same batch, and the words of the orchestrator
are heeded between training steps only, by all ranks alike. Waiting ranks wait in a bounded collective for the first.

Recovery: from the newest checkpoint that is whole, the recorded batches up to the ledger's newest version are trained again without
publishing; then that version is offered once more (bit-equal arithmetic gives the same digest, and its new address is
taken) and the run goes on. A recorded batch that is damaged in the journal is passed over: the weights then differ from
the ledger's newest version, as after arithmetic that is not bit-equal. The loop knows nothing about gRPC: it is given a ``Link``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import structlog
import torch

from services.common.checkpoints.gauges import CheckpointGauge
from services.common.errors import BatchLostError, MillraceError, ModelMismatchError, VersionConflictError
from services.common.types import Interval, RankBatch, WeightVersion
from services.trainer.checkpoint import CheckpointFailedError, Checkpoints
from services.trainer.sharding import Ranks
from services.trainer.step import TrainStep

log = structlog.get_logger()

PAUSE_POLL_S = 0.2
_GO, _PAUSE, _STOP = 0, 1, 2
_REPLAYING = "replaying"


class _Lost:
    """In place of a recorded batch that the journal cannot give any more."""


class CannotReplayError(MillraceError):
    """Newer checkpoints are damaged, and the recorded batches since the newest whole one are not all there."""


class Link(Protocol):
    """One rank's way to the orchestrator. Commands, states and versions are the first rank's business."""

    def pull(self, training_step: int) -> RankBatch | None:
        """This rank's share; None after a bounded wait, or when there is a command to heed."""
        ...

    def publish(
        self, version: WeightVersion, metrics: Mapping[str, float], intervals: Sequence[Interval], finished_at: float
    ) -> None: ...

    def set_state(self, state: str, training_step: int) -> None: ...

    def set_gauge(self, name: str, value: float) -> None: ...

    def set_checkpoint_steps(self, kept: Sequence[int]) -> None: ...

    def take_checkpoint_command(self) -> bool: ...

    @property
    def paused(self) -> bool: ...

    @property
    def stopped(self) -> bool:
        """Whether to leave between two training steps."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A version that can be fetched."""

    version: WeightVersion
    metrics: Mapping[str, float] = field(default_factory=dict)  # what publishing cost, beside the step's own metrics


class Publisher(Protocol):
    """Makes the current weights fetchable. ``publish`` is a collective; ranks other than the first get None."""

    def publish(self, version: int) -> Published | None: ...


class TrainingLoop:
    """Owns the order of things, nothing else."""

    def __init__(
        self,
        *,
        step: TrainStep,
        link: Link,
        publisher: Publisher,
        checkpoints: Checkpoints,
        ranks: Ranks,
        num_steps: int,
        checkpoint_every: int,
    ) -> None:
        self._step = step
        self._link = link
        self._publisher = publisher
        self._checkpoints = checkpoints
        self._ranks = ranks
        self._num_steps = num_steps
        self._checkpoint_every = checkpoint_every
        self._saved = 0
        self._checkpoint_due = False
        self._waited_s = 0.0
        self.failed_checkpoints = 0
        self.steps_not_replayed = 0

    def recover(self, checkpoint_step: int, newest_version: int) -> int:
        """Replay up to the ledger's newest version and offer it again; returns the last training step done.

        ``newest_version`` is -1 when nothing is published yet: then version 0 is.

        Raises:
            ModelMismatchError: the checkpoint is ahead of the ledger, so it is of another history.
            CannotReplayError: newer checkpoints were damaged, and the journal lacks a batch that they had trained.
        """
        # One ahead: told to leave between the updates of a step and its publication.
        if checkpoint_step > newest_version + 1:
            raise ModelMismatchError(
                f"the checkpoint of step {checkpoint_step} is ahead of the ledger, whose newest version is "
                f"{newest_version}: it belongs to another history; remove it, or bring its journal back"
            )
        self._saved = checkpoint_step
        self._link.set_checkpoint_steps(self._checkpoints.kept())
        self._link.set_gauge(CheckpointGauge.DAMAGED.value, len(self._checkpoints.set_aside()))
        for training_step in range(checkpoint_step + 1, newest_version + 1):
            batch = self._next_batch(training_step, _REPLAYING)
            if batch is None:
                return training_step - 1  # stopped while replaying
            if isinstance(batch, _Lost):
                if set_aside := self._checkpoints.set_aside(checkpoint_step):
                    raise _cannot_replay(checkpoint_step, training_step, newest_version, set_aside)
                # The weights differ from the ledger's newest from here on: replicas keep that one until the next.
                self.steps_not_replayed += 1
                self._link.set_gauge("steps_not_replayed", self.steps_not_replayed)
                log.error("step.not_replayed", step=training_step, newest_version=newest_version)
                continue
            self._step.run(batch)
            log.info("step.replayed", step=training_step, newest_version=newest_version)
        done = max(checkpoint_step, newest_version, 0)
        self._link.set_state("publishing", done)
        self._publish(done, {}, [], time.time())
        return done

    def run(self, done: int) -> int:
        """Train until the last step, or until told to leave; returns the last training step done."""
        while done < self._num_steps:
            batch = self._next_batch(done + 1, "waiting_for_batch")
            if not isinstance(batch, RankBatch):
                break
            done += 1
            self._train(batch)
            if done % self._checkpoint_every == 0 or done == self._num_steps:
                self._checkpoint_due = True
            self._checkpoint_if_due(done)
        if done != self._saved:
            self._checkpoint_due = True
            self._checkpoint_if_due(done)
        return done

    def wait_for_stop(self, done: int) -> None:
        """Let replicas fetch the last version until the orchestrator says that the run is over.

        Without a deadline: an end evaluation lasts as long as it lasts, and the lease is renewed meanwhile.
        """
        self._link.set_state("finished", done)
        while self._agreed_word() != _STOP:
            time.sleep(PAUSE_POLL_S)

    def _train(self, batch: RankBatch) -> None:
        self._link.set_state("training", batch.training_step)
        started = time.time()
        metrics = self._step.run(batch)
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
        self._link.set_state("publishing", batch.training_step)
        flat = {name: float(value) for name, value in metrics.as_dict().items()}
        self._publish(batch.training_step, flat, [(started, finished)], finished)

    def _publish(
        self, version: int, metrics: Mapping[str, float], intervals: Sequence[Interval], finished_at: float
    ) -> None:
        published = self._publisher.publish(version)
        if published is None:
            return
        try:
            self._link.publish(published.version, {**metrics, **published.metrics}, intervals, finished_at)
        except VersionConflictError as error:
            # Replayed arithmetic was not bit-equal (a GPU): replicas keep the version they hold. The publisher knows
            # that version under another digest, so it sends them the next one in full.
            log.warning("version.differs_after_replay", version=version, error=error.message)

    def _next_batch(self, training_step: int, state: str) -> RankBatch | _Lost | None:
        """The step's batch, once every rank holds its share; None when told to leave. While replaying, ``_Lost`` where the
        journal cannot give it any more.

        The first rank, which hears the commands, waits for the batch; the others ask when it is there and recorded,
        so that they wait for no batch which a pause or a stop has made meaningless.
        """
        while True:
            word = self._agreed_word()
            if word == _STOP:
                return None
            if word == _PAUSE:
                self._link.set_state("paused", training_step)
                time.sleep(PAUSE_POLL_S)
                continue
            self._link.set_state(state, training_step)
            began = time.monotonic()
            batch = self._pull_first(training_step, state) if self._ranks.is_first else None
            holding = self._num_holding(batch)
            if holding < 0:
                return _Lost()
            if holding == 1:
                if not self._ranks.is_first:
                    batch = self._link.pull(training_step)
                if self._num_holding(batch) == self._ranks.world_size:
                    self._count_wait(time.monotonic() - began)
                    return batch
            self._count_wait(time.monotonic() - began)

    def _pull_first(self, training_step: int, state: str) -> RankBatch | _Lost | None:
        """The first rank's share; a batch that is lost may be passed over only while its version exists already."""
        try:
            return self._link.pull(training_step)
        except BatchLostError as error:
            if state != _REPLAYING:
                raise
            log.warning("batch.lost", step=training_step, error=error.message)
            return _Lost()

    def _num_holding(self, batch: RankBatch | _Lost | None) -> int:
        """Ranks that hold the batch; below 0 when it is lost."""
        held = -1 if isinstance(batch, _Lost) else int(batch is not None)
        return int(self._ranks.sum(torch.tensor(held, device=self._ranks.device)))

    def _agreed_word(self) -> int:
        word = _STOP if self._link.stopped else _PAUSE if self._link.paused else _GO
        return int(self._ranks.max(torch.tensor(word, device=self._ranks.device)))

    def _count_wait(self, seconds: float) -> None:
        self._waited_s += seconds
        self._link.set_gauge("waited_s", self._waited_s)

    def _checkpoint_if_due(self, done: int) -> None:
        asked = int(self._link.take_checkpoint_command() or self._checkpoint_due)
        if not int(self._ranks.max(torch.tensor(asked, device=self._ranks.device))):
            return
        self._link.set_state("checkpointing", done)
        try:
            self._checkpoints.save(done, self._step.model, self._step.optimizer)
        except CheckpointFailedError as error:
            # Training goes on; the next step tries again. What is recorded since the last checkpoint is kept.
            self.failed_checkpoints += 1
            self._checkpoint_due = True
            self._link.set_gauge(CheckpointGauge.FAILED.value, self.failed_checkpoints)
            log.error("checkpoint.failed", step=done, error=error.message, failures=self.failed_checkpoints)
            return
        self._checkpoint_due = False
        self._saved = done
        self._link.set_checkpoint_steps(self._checkpoints.kept())


def _cannot_replay(begun: int, training_step: int, newest_version: int, set_aside: Sequence[str]) -> CannotReplayError:
    begin = f"the checkpoint of step {begun}" if begun else "the initial model"
    return CannotReplayError(
        f"the run is at step {newest_version}; its newer checkpoints are damaged and were set aside "
        f"({'; '.join(set_aside)}), and going on from {begin} needs the batch of step {training_step}, which the journal "
        "does not have any more. Put an undamaged copy of one back under its name and resume. Or begin another run from "
        "what is whole: `millrace checkpoints RUN` says of each whether its weights are, `millrace export RUN --step K` "
        f"exports them. Or remove the directories that were set aside and resume: the run then goes on from {begin} without "
        "the steps whose batches are gone"
    )
