"""What trainers ask of the ring: a lease, a step's batch, a place for a version in the ledger. Knows nothing about grpc."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping

import structlog

from services.common.errors import InvalidRequestError
from services.common.types import Interval, WeightVersion
from services.orchestrator.batches import Batch
from services.orchestrator.commands import PauseTraining, StopTraining
from services.orchestrator.journal import records
from services.orchestrator.ring import Ring
from services.orchestrator.trainers import Trainer

log = structlog.get_logger()


class TrainerSide:
    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._publishing = {policy: asyncio.Lock() for policy in ring.ledgers}

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
        """Give the policy's lease to a trainer; raises UnknownPolicyError. ``vocab_size``: rows of its embedding; 0 where it does
        not say."""
        ring = self._ring
        newest = ring.ledgers[ring.trainers.known(policy)].newest_number
        # What is recorded up to a checkpoint may be collected: one ahead of the ledger is of another history.
        recovered = min(recovered_version, newest)
        trainer = ring.trainers.join(policy, incarnation, num_ranks, recovered, labels, kept_checkpoint_steps)
        log.info("trainer.joined", policy=policy, incarnation=incarnation, recovered_version=recovered_version)
        ring.bounds.learn_vocabulary(policy, vocab_size)
        ring.standing.lost.pop(f"trainer/{policy}", None)
        ring.experience.admission.absent.discard(policy)
        assert trainer.mailbox is not None
        if ring.control.ended:
            trainer.mailbox.put(StopTraining(f"the run has {ring.control.phase.value}"))
        elif ring.control.paused:
            trainer.mailbox.put(PauseTraining())
        return trainer

    async def pull_batch(self, policy: str, training_step: int, timeout_s: float) -> Batch:
        """The batch of a step, the same for whoever asks again.

        Raises:
            UnknownPolicyError, InvalidRequestError: there is no such policy or step.
            DeadlineError: there is no such batch yet.
        """
        num_steps = self._ring.num_steps
        if training_step > num_steps:
            raise InvalidRequestError(f"training step {training_step} of {policy}: the run has {num_steps} steps")
        batch = await self._ring.batches[self._ring.trainers.known(policy)].get(training_step, timeout_s)
        self._ring.batch_taken(training_step)
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
        ring = self._ring
        policy = ring.trainers.known(version.policy)
        ledger = ring.ledgers[policy]
        async with self._publishing[policy]:
            trainer = ring.trainers.check(policy, incarnation)
            if trainer is not None:
                trainer.checkpoint_step = max(trainer.checkpoint_step, checkpoint_step)
                trainer.kept_checkpoint_steps = tuple(sorted(kept_checkpoint_steps))
            intervals = list(compute)
            ring.timeline.computed(policy, intervals)
            is_new = ledger.check(version)
            if version.number > ring.num_steps:
                raise InvalidRequestError(f"version {version.number} of {policy}: the run has {ring.num_steps} steps")
            if is_new or ledger.get(version.number) != version:
                await ring.journal.append(
                    records.VERSION,
                    f"{policy}/{version.number}",
                    lambda: records.version_to_json(version, checkpoint_step, metrics, intervals),
                    apply=lambda: ring.apply_version(version, metrics),
                )
                ring.announce(policy, is_new)
            if is_new:
                log.info("version.published", policy=policy, version=version.number, digest=version.digest)
                if version.number > 0:
                    self._write_step(version, metrics, sum(end - begin for begin, end in intervals))
        return ledger.newest_number

    def _write_step(self, version: WeightVersion, metrics: Mapping[str, float], compute_s: float) -> None:
        """The row of the training step that brought this version: of its batch, of the trainer, of the run."""
        ring, policy, step = self._ring, version.policy, version.number
        statistics = ring.batches[policy].statistics.pop(step, {})
        values = {
            **statistics,
            **{f"trainer/{name}": value for name, value in metrics.items()},
            **ring.training_orders.curation.gauges(),
            "compute_s": compute_s,
            "elapsed_s": time.time() - ring.started_at,
        }
        ring.last_metrics[policy] = values
        ring.metrics.training_step(policy, step, values)
        ring.write_state()
