"""Handles the calls of trainers: lease, batch of a step, and published versions. Independent of grpc."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping

import structlog

from services.common.errors import InvalidRequestError
from services.common.records.types import Interval, WeightVersion
from services.orchestrator.buffer.batches import Batch, Batches
from services.orchestrator.dispatch.published_versions import PublishedVersions
from services.orchestrator.ingest.bounds import RecordBounds
from services.orchestrator.journal import records
from services.orchestrator.journal.writer import Journal
from services.orchestrator.members.absences import Absences
from services.orchestrator.members.commands import PauseTraining, SaveCheckpoint, StopTraining
from services.orchestrator.members.device_turns import DeviceTurns
from services.orchestrator.members.trainers import Trainer, TrainerLeases
from services.orchestrator.metrics.run_metrics import StepRows
from services.orchestrator.state.run_control import RunControl
from services.orchestrator.state.timeline import Timeline
from services.orchestrator.state.versions import VersionLedger

log = structlog.get_logger()


class TrainerApi:
    def __init__(
        self,
        *,
        trainers: TrainerLeases,
        absences: Absences,
        turns: DeviceTurns,
        control: RunControl,
        ledgers: Mapping[str, VersionLedger],
        versions: PublishedVersions,
        batches: Mapping[str, Batches],
        batch_taken: Callable[[int], None],
        bounds: RecordBounds,
        journal: Journal,
        step_rows: StepRows,
        timeline: Timeline,
    ) -> None:
        """``batch_taken`` is called with the training step of every batch that a trainer received."""
        self._trainers = trainers
        self._absences = absences
        self._turns = turns
        self._control = control
        self._ledgers = ledgers
        self._versions = versions
        self._batches = batches
        self._batch_taken = batch_taken
        self._bounds = bounds
        self._journal = journal
        self._step_rows = step_rows
        self._timeline = timeline
        self._publishing = {policy: asyncio.Lock() for policy in ledgers}

    def join(
        self,
        policy: str,
        incarnation: str,
        num_ranks: int,
        recovered_version: int,
        labels: Mapping[str, str],
        kept_checkpoint_steps: Iterable[int] = (),
        vocab_size: int = 0,
    ) -> Trainer:
        """Give the policy's lease to a trainer; raises UnknownPolicyError. ``vocab_size``: rows of its embedding; 0 for
        unknown."""
        newest = self._ledgers[self._trainers.known(policy)].newest_number
        # Retention may delete records up to a checkpoint: one ahead of the ledger belongs to another history.
        recovered = min(recovered_version, newest)
        before = self._trainers.get(policy)
        trainer = self._trainers.join(policy, incarnation, num_ranks, recovered, labels, kept_checkpoint_steps)
        log.info("trainer.joined", policy=policy, incarnation=incarnation, recovered_version=recovered_version)
        self._bounds.learn_vocabulary(policy, vocab_size)
        self._absences.trainer_found(policy)
        assert trainer.mailbox is not None
        if self._control.ended:
            trainer.mailbox.put(StopTraining(f"the run has {self._control.phase.value}"))
        elif self._control.paused:
            trainer.mailbox.put(PauseTraining())
        elif self._versions.ended_early:
            trainer.mailbox.put(SaveCheckpoint())
        self._turns.trainer_joined(trainer, again=trainer is before)
        return trainer

    async def pull_batch(self, policy: str, training_step: int, timeout_s: float) -> Batch:
        """The batch of a step, the same for every caller.

        Raises:
            UnknownPolicyError, InvalidRequestError: the policy or step does not exist.
            DeadlineError: the batch is not ready.
        """
        num_steps = self._versions.num_steps
        if training_step > num_steps:
            raise InvalidRequestError(f"training step {training_step} of {policy}: the run has {num_steps} steps")
        batch = await self._batches[self._trainers.known(policy)].get(training_step, timeout_s)
        self._batch_taken(training_step)
        return batch

    async def publish(
        self,
        version: WeightVersion,
        incarnation: str,
        *,
        metrics: Mapping[str, float],
        compute: Iterable[Interval],
        checkpoint_step: int,
        kept_checkpoint_steps: Iterable[int] = (),
    ) -> int:
        """Record a version in the ledger and tell the replicas; returns the newest number.

        Raises:
            VersionConflictError, LeaseLostError, UnknownPolicyError, InvalidRequestError
        """
        policy = self._trainers.known(version.policy)
        ledger = self._ledgers[policy]
        async with self._publishing[policy]:
            trainer = self._trainers.check(policy, incarnation)
            if trainer is not None:
                trainer.checkpoint_step = max(trainer.checkpoint_step, checkpoint_step)
                trainer.kept_checkpoint_steps = tuple(sorted(kept_checkpoint_steps))
            intervals = list(compute)
            self._timeline.computed(policy, intervals)
            is_new = ledger.check(version)
            if version.number > self._versions.num_steps:
                raise InvalidRequestError(
                    f"version {version.number} of {policy}: the run has {self._versions.num_steps} steps"
                )
            if is_new or ledger.get(version.number) != version:
                await self._journal.append(
                    records.VERSION,
                    f"{policy}/{version.number}",
                    lambda: records.version_to_json(version, checkpoint_step, metrics, intervals),
                    apply=lambda: self._versions.apply(version, metrics),
                )
                self._versions.announce(policy, is_new)
            if is_new:
                log.info("version.published", policy=policy, version=version.number, digest=version.digest)
                if version.number > 0:
                    self._step_rows.write(version, metrics, sum(end - begin for begin, end in intervals))
        return ledger.newest_number
