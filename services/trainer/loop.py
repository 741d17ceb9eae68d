"""The training loop: one batch, its updates, one published version, over and over.

    commands -> pull (every rank its share) -> agree -> train -> publish -> now and then a checkpoint

Recovery: from the newest checkpoint, the recorded batches up to the ledger's newest version are trained again without
publishing; then that version is offered once more (bit-equal arithmetic gives the same digest, and its new address is
taken) and the run goes on. The loop knows nothing about gRPC: it is given a ``Link``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Protocol

import structlog
import torch

from services.common.errors import InfrastructureError, VersionConflictError
from services.common.types import RankBatch, WeightVersion
from services.trainer.checkpoint import Checkpoints
from services.trainer.metrics import StepMetrics
from services.trainer.sharding import Ranks
from services.trainer.step import TrainStep

log = structlog.get_logger()

PAUSE_POLL_S = 0.2
_GO, _PAUSE, _STOP = 0, 1, 2

Interval = tuple[float, float]


class Link(Protocol):
    """What the loop needs of the orchestrator. Commands, states and versions are the first rank's business."""

    def pull(self, training_step: int) -> RankBatch | None: ...

    def publish(
        self, version: WeightVersion, metrics: Mapping[str, float], intervals: Sequence[Interval], finished_at: float
    ) -> None: ...

    def set_state(self, state: str, training_step: int) -> None: ...

    def set_checkpoint_step(self, step: int) -> None: ...

    def take_checkpoint_command(self) -> bool: ...

    @property
    def paused(self) -> bool: ...

    @property
    def stopped(self) -> bool: ...


class Publisher(Protocol):
    """Makes the current weights fetchable. ``publish`` is a collective; ranks other than the first get None."""

    def publish(self, version: int) -> WeightVersion | None: ...


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
        self.failed_checkpoints = 0

    def recover(self, checkpoint_step: int, newest_version: int) -> int:
        """Replay up to the ledger's newest version and offer it again; returns the last training step done."""
        self._saved = checkpoint_step
        self._link.set_checkpoint_step(checkpoint_step)
        for training_step in range(checkpoint_step + 1, newest_version + 1):
            batch = self._next_batch(training_step, "replaying")
            if batch is None:
                return training_step - 1  # stopped while replaying
            self._step.run(batch)
            log.info("step.replayed", step=training_step, newest_version=newest_version)
        done = max(checkpoint_step, newest_version, 0)
        self._publish(done, {}, [], time.time())
        return done

    def run(self, done: int) -> None:
        """Train until the last step, then serve what is published until told to stop."""
        while done < self._num_steps:
            batch = self._next_batch(done + 1, "waiting_for_batch")
            if batch is None:
                break
            done += 1
            self._train(batch)
            if done % self._checkpoint_every == 0 or done == self._num_steps:
                self._checkpoint_due = True
            self._checkpoint_if_due(done)
        if done != self._saved:
            self._checkpoint_due = True
            self._checkpoint_if_due(done)
        self._set_state("finished", done)
        self._wait_for_stop()

    def _train(self, batch: RankBatch) -> None:
        self._set_state("training", batch.training_step)
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
        self._set_state("publishing", batch.training_step)
        self._publish(batch.training_step, flatten(metrics), [(started, finished)], finished)

    def _publish(
        self, version: int, metrics: Mapping[str, float], intervals: Sequence[Interval], finished_at: float
    ) -> None:
        published = self._publisher.publish(version)
        if published is None:
            return
        try:
            self._link.publish(published, metrics, intervals, finished_at)
        except VersionConflictError as error:
            # Replayed arithmetic was not bit-equal (a GPU): replicas keep the version they hold, the next is full.
            log.warning("version.differs_after_replay", version=version, error=error.message)

    def _next_batch(self, training_step: int, state: str) -> RankBatch | None:
        """The step's batch, once every rank holds its share; None when told to stop. Ranks agree before they compute."""
        while True:
            self._set_state(state, training_step)
            word = self._agreed_word()
            if word == _STOP:
                return None
            if word == _PAUSE:
                self._set_state("paused", training_step)
                time.sleep(PAUSE_POLL_S)
                continue
            batch = self._link.pull(training_step)
            holds = torch.tensor(int(batch is not None), device=self._ranks.device)
            if int(self._ranks.sum(holds)) == self._ranks.world_size:
                return batch

    def _agreed_word(self) -> int:
        word = _STOP if self._link.stopped else _PAUSE if self._link.paused else _GO
        return int(self._ranks.max(torch.tensor(word, device=self._ranks.device)))

    def _checkpoint_if_due(self, done: int) -> None:
        asked = int(self._link.take_checkpoint_command() or self._checkpoint_due)
        if not int(self._ranks.max(torch.tensor(asked, device=self._ranks.device))):
            return
        self._set_state("checkpointing", done)
        try:
            self._checkpoints.save(done, self._step.model, self._step.optimizer)
        except OSError as error:
            # Training goes on; the next step tries again. What is recorded since the last checkpoint is kept.
            self.failed_checkpoints += 1
            self._checkpoint_due = True
            log.error("checkpoint.failed", step=done, error=str(error), failures=self.failed_checkpoints)
            return
        self._checkpoint_due = False
        self._saved = done
        self._link.set_checkpoint_step(done)

    def _wait_for_stop(self) -> None:
        while self._agreed_word() != _STOP:
            time.sleep(PAUSE_POLL_S)

    def _set_state(self, state: str, training_step: int) -> None:
        self._link.set_state(state, training_step)


def flatten(metrics: StepMetrics) -> dict[str, float]:
    """Flat numbers for the wire: nested ones by their own names."""
    flat: dict[str, float] = {}
    for name, value in asdict(metrics).items():
        if isinstance(value, Mapping):
            flat.update({str(key): float(item) for key, item in value.items()})
        else:
            flat[name] = float(value)
    return flat


def require_steps(run_steps: int, told: int) -> int:
    """The recipe and the orchestrator must agree on the length of the run."""
    if told != run_steps:
        raise InfrastructureError(f"the orchestrator runs {told} steps, the recipe says {run_steps}: another recipe?")
    return told
