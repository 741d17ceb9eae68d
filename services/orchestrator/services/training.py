"""The calls of trainers: lease, batch of a step, and published versions."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

import grpc
import structlog

from services.common.aio import called
from services.common.errors import InvalidRequestError, UnknownPolicyError
from services.common.pb import (
    pool_pb2,
    training_pb2,
    training_pb2_grpc,
)
from services.common.records import DeviceTurn, Interval, WeightVersion
from services.common.telemetry.accounts import AccountState, ActivityName, PeerState
from services.common.telemetry.logs import LogEvent
from services.common.wire import batch_chunks, duration_to_proto, read, write
from services.orchestrator.buffer.assembly import MOST_AT_ONCE, Batch
from services.orchestrator.journal import entries
from services.orchestrator.members import (
    MOST_NAME,
    StopTraining,
    Trainer,
    TrainerCommand,
    TrainerRequest,
    check_id,
    check_number,
    possible_intervals,
)
from services.orchestrator.orchestrator import OrchestratorCore

log = structlog.get_logger()

Context = grpc.aio.ServicerContext[Any, Any]

PULL_WAIT_S = 55.0  # below the 60 s that callers allow, so that they hear the reason
PULL_MARGIN_S = 0.5
MOST_RANKS = 1 << 16
MOST_ROWS = (1 << 31) - 1  # of an embedding
MOST_SOURCES, MOST_ADDRESS = 256, 1024  # of a version, and the characters of each
CHUNK_BYTES = 256 * 1024  # of sequences in one message: a message for each sequence costs more than its contents


class TrainingServicer(training_pb2_grpc.TrainingServiceServicer):
    def __init__(self, core: OrchestratorCore) -> None:
        self._core = core
        self._publishing = {policy: asyncio.Lock() for policy in core.batches}

    def join(
        self,
        policy: str,
        incarnation: str,
        num_ranks: int,
        recovered_version: int,
        kept_checkpoint_steps: Iterable[int] = (),
        vocab_size: int = 0,
    ) -> Trainer:
        """Give the policy's lease to a trainer; raises UnknownPolicyError. ``vocab_size``: rows of its embedding; 0 for
        unknown."""
        before = self._core.trainers.get(policy)
        trainer = self._core.trainers.join(policy, incarnation, num_ranks)
        trainer.note_checkpoints(self._core.ledgers[policy].newest_number, recovered_version, kept_checkpoint_steps)
        log.info("trainer.joined", policy=policy, incarnation=incarnation, recovered_version=recovered_version)
        self._core.bounds.learn_vocabulary(policy, vocab_size)
        self._core.trainer_found(policy)
        assert trainer.mailbox is not None
        if self._core.control.ended:
            trainer.mailbox.put(StopTraining(f"the run has {self._core.control.phase.value}"))
        elif self._core.control.paused:
            trainer.mailbox.put(TrainerRequest.PAUSE)
        elif self._core.ended_early:
            trainer.mailbox.put(TrainerRequest.SAVE_CHECKPOINT)
        self._core.turns.trainer_joined(trainer, again=trainer is before)
        return trainer

    async def pull_batch(self, policy: str, training_step: int, timeout_s: float) -> Batch:
        """The batch of a step, the same for every caller.

        Raises:
            UnknownPolicyError, InvalidRequestError: the policy or step does not exist.
            DeadlineError: the batch is not ready.
        """
        num_steps = self._core.num_steps
        if policy not in self._core.batches:
            raise UnknownPolicyError(f"no policy {policy!r} in this run; it has {', '.join(self._core.batches)}")
        if training_step > num_steps:
            raise InvalidRequestError(f"training step {training_step} of {policy}: the run has {num_steps} steps")
        batch = await self._core.batches[policy].get(training_step, timeout_s)
        if training_step == num_steps:
            self._core.last_batch_taken()
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
        policy, intervals = version.policy, tuple(compute)
        self._core.trainers.get(policy)  # refuses an unknown policy
        ledger = self._core.ledgers[policy]
        async with self._publishing[policy]:
            trainer = self._core.trainers.check(policy, incarnation)
            if trainer is not None:
                trainer.note_checkpoints(ledger.newest_number, checkpoint_step, kept_checkpoint_steps)
            is_new = ledger.check(version)
            if version.number > self._core.num_steps:
                raise InvalidRequestError(
                    f"version {version.number} of {policy}: the run has {self._core.num_steps} steps"
                )
            if is_new or ledger.versions.get(version.number) != version:
                await self._core.journal.append(
                    entries.VERSION,
                    f"{policy}/{version.number}",
                    entries.VersionRecord(
                        version=version,
                        checkpoint_step=min(checkpoint_step, max(ledger.newest_number, 0)),
                        metrics=metrics,
                        compute=intervals,
                    ),
                    self._core.apply_version,
                    version,
                    metrics,
                )
                self._core.announce_version(policy, is_new)
            if is_new:
                log.info("version.published", policy=policy, version=version.number, digest=version.digest)
                if version.number > 0:
                    # the row takes about a millisecond; the announcements leave first
                    asyncio.get_running_loop().call_soon(self._core.write_step, version, metrics, intervals)
        return ledger.newest_number

    # --- RPCs -----------------------------------------------------------------------------------------------------------

    async def JoinTraining(
        self, request: training_pb2.JoinTrainingRequest, context: Context
    ) -> AsyncIterator[training_pb2.JoinTrainingResponse]:
        check_id("incarnation", request.incarnation)
        trainer = self.join(
            request.policy,
            request.incarnation,
            max(check_number("num_ranks", request.num_ranks, 0, MOST_RANKS), 1),
            check_number("recovered_version", request.recovered_version, -1),
            request.kept_checkpoint_steps,
            check_number("vocab_size", request.vocab_size, 0, MOST_ROWS),
        )
        mailbox = trainer.mailbox
        assert mailbox is not None
        ledger = self._core.ledgers[request.policy]
        try:
            yield training_pb2.JoinTrainingResponse(
                welcome=training_pb2.TrainingWelcome(
                    run_id=self._core.run_id,
                    newest_version=ledger.newest_number,
                    newest_digest="" if ledger.newest is None else ledger.newest.digest,
                    num_steps=self._core.num_steps,
                    lease=duration_to_proto(self._core.trainers.lease_s),
                )
            )
            while (command := await mailbox.get()) is not None:
                yield _command(command)
        finally:
            self._core.trainers.stream_ended(trainer, mailbox)
            log.info("trainer.stream_ended", policy=request.policy)

    async def ReportTrainer(
        self, request: training_pb2.ReportTrainerRequest, context: Context
    ) -> training_pb2.ReportTrainerResponse:
        accounts = tuple([read(AccountState, account) for account in request.accounts])
        check_number("rank", request.rank, 0, MOST_RANKS)
        if request.rank > 0:
            self._core.trainers.report_rank(request.policy, request.rank, accounts)
            return training_pb2.ReportTrainerResponse(lease=duration_to_proto(self._core.trainers.lease_s))
        step = check_number("training_step", request.training_step, 0)
        checkpoint_step = check_number("checkpoint_step", request.checkpoint_step, 0)
        peers = tuple([read(PeerState, peer) for peer in request.peers])
        trainer = self._core.trainers.renew(request.policy, request.incarnation)
        trainer.training_step, trainer.state, trainer.refusal = step, request.state, request.refusal
        newest = self._core.ledgers[request.policy].newest_number
        trainer.note_checkpoints(newest, checkpoint_step, request.kept_checkpoint_steps)
        trainer.gauges = {name: value for name, value in request.gauges.items() if math.isfinite(value)}
        trainer.accounts[0], trainer.peers, trainer.device_turn = accounts, peers, request.device_turn
        if request.state == ActivityName.FINISHED:
            self._core.turns.trainer_finished(request.policy)
        self._core.turns.settle()
        return training_pb2.ReportTrainerResponse(lease=duration_to_proto(self._core.trainers.lease_s))

    # A coroutine that writes, not a generator: each message then passes one frame instead of three.
    async def PullBatch(  # type: ignore[override]
        self, request: training_pb2.PullBatchRequest, context: Context
    ) -> None:
        if not 0 <= request.rank < request.num_ranks:
            raise InvalidRequestError(
                f"rank is {request.rank}; it must be at least 0 and below num_ranks ({request.num_ranks})"
            )
        remaining = context.time_remaining()
        wait_s = PULL_WAIT_S if remaining is None else max(0.1, min(PULL_WAIT_S, remaining - PULL_MARGIN_S))
        batch = await self.pull_batch(request.policy, request.training_step, wait_s)
        log.info(
            LogEvent.BATCH_PULLED,
            policy=request.policy,
            step=request.training_step,
            rank=request.rank,
            num_ranks=request.num_ranks,
            recorded_before=batch.replayed,
        )
        is_large = len(batch.record.entries) > MOST_AT_ONCE
        share = await called(batch.share, request.rank, request.num_ranks, in_thread=is_large)
        header = training_pb2.BatchHeader(
            training_step=share.training_step,
            minibatches=[write(totals, training_pb2.MinibatchTotals()) for totals in share.minibatches],
            num_sequences=len(share.sequences),
            replayed=batch.replayed,
        )
        await context.write(training_pb2.PullBatchResponse(header=header))
        for response in batch_chunks(share.sequences, CHUNK_BYTES):
            await context.write(response)
        footer = training_pb2.BatchFooter(num_sequences=len(share.sequences))
        await context.write(training_pb2.PullBatchResponse(footer=footer))

    async def PublishVersion(
        self, request: training_pb2.PublishVersionRequest, context: Context
    ) -> training_pb2.PublishVersionResponse:
        if request.version.run_id and request.version.run_id != self._core.run_id:
            raise InvalidRequestError(f"version of run {request.version.run_id!r}; this is run {self._core.run_id!r}")
        version = read(WeightVersion, request.version)
        check_number(f"the version of {version.policy[:MOST_NAME]}", version.number, 0)
        check_id("its digest", version.digest)
        if len(version.sources) > MOST_SOURCES or any(len(source) > MOST_ADDRESS for source in version.sources):
            raise InvalidRequestError(f"a version has {len(version.sources)} sources, or one with a very long address")
        newest = await self.publish(
            version,
            request.incarnation,
            metrics=dict(request.metrics),
            compute=possible_intervals((each.start_s, each.end_s) for each in request.compute_intervals),
            checkpoint_step=check_number("checkpoint_step", request.checkpoint_step, 0),
            kept_checkpoint_steps=request.kept_checkpoint_steps,
        )
        return training_pb2.PublishVersionResponse(newest_version=newest)


def _command(command: TrainerCommand) -> training_pb2.JoinTrainingResponse:
    match command:
        case TrainerRequest():
            response = training_pb2.JoinTrainingResponse()
            getattr(response, command.value).SetInParent()
            return response
        case StopTraining(reason):
            return training_pb2.JoinTrainingResponse(stop=training_pb2.StopTraining(reason=reason))
        case DeviceTurn():
            return training_pb2.JoinTrainingResponse(device_turn=write(command, pool_pb2.DeviceTurn()))
