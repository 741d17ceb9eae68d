"""The membrane to trainers: convert, call the ring, convert."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import structlog

from services.common import serde
from services.common.errors import InvalidRequestError
from services.common.pb import training_pb2, training_pb2_grpc
from services.common.serde_accounts import account_from_proto, peer_from_proto
from services.orchestrator.commands import (
    PauseTraining,
    ResumeTraining,
    SaveCheckpoint,
    StopTraining,
    TrainerCommand,
)
from services.orchestrator.ring import Ring
from services.orchestrator.trainer_side import TrainerSide

log = structlog.get_logger()

Context = grpc.aio.ServicerContext[Any, Any]

PULL_WAIT_S = 55.0  # below the 60 s that callers allow, so that they hear the reason
PULL_MARGIN_S = 0.5


class TrainingServicer(training_pb2_grpc.TrainingServiceServicer):
    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._side = TrainerSide(ring)

    async def JoinTraining(
        self, request: training_pb2.JoinTrainingRequest, context: Context
    ) -> AsyncIterator[training_pb2.JoinTrainingResponse]:
        if not request.incarnation:
            raise InvalidRequestError("incarnation must be set")
        ring = self._ring
        trainer = self._side.join(
            request.policy,
            request.incarnation,
            max(request.num_ranks, 1),
            request.recovered_version,
            dict(request.labels),
            request.kept_checkpoint_steps,
            request.vocab_size,
        )
        mailbox = trainer.mailbox
        assert mailbox is not None
        ledger = ring.ledgers[request.policy]
        try:
            yield training_pb2.JoinTrainingResponse(
                welcome=training_pb2.TrainingWelcome(
                    run_id=ring.run_id,
                    newest_version=ledger.newest_number,
                    newest_digest="" if ledger.newest is None else ledger.newest.digest,
                    num_steps=ring.num_steps,
                    lease=serde.duration_to_proto(ring.trainers.lease_s),
                )
            )
            while (command := await mailbox.get()) is not None:
                yield _command(command)
        finally:
            ring.trainers.stream_ended(trainer, mailbox)
            log.info("trainer.stream_ended", policy=request.policy)

    async def ReportTrainer(
        self, request: training_pb2.ReportTrainerRequest, context: Context
    ) -> training_pb2.ReportTrainerResponse:
        accounts = tuple(account_from_proto(account) for account in request.accounts)
        if request.rank > 0:
            self._ring.trainers.report_rank(request.policy, request.rank, accounts)
            return training_pb2.ReportTrainerResponse(lease=serde.duration_to_proto(self._ring.trainers.lease_s))
        self._ring.trainers.report(
            request.policy,
            request.incarnation,
            training_step=request.training_step,
            state=request.state,
            checkpoint_step=request.checkpoint_step,
            gauges=dict(request.gauges),
            kept_checkpoint_steps=request.kept_checkpoint_steps,
            accounts=accounts,
            peers=tuple(peer_from_proto(peer) for peer in request.peers),
        )
        return training_pb2.ReportTrainerResponse(lease=serde.duration_to_proto(self._ring.trainers.lease_s))

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
        batch = await self._side.pull_batch(request.policy, request.training_step, wait_s)
        log.info(
            "batch.pulled",
            policy=request.policy,
            step=request.training_step,
            rank=request.rank,
            num_ranks=request.num_ranks,
            recorded_before=batch.replayed,
        )
        share = batch.share(request.rank, request.num_ranks)
        header = training_pb2.BatchHeader(
            training_step=share.training_step,
            minibatches=[serde.totals_to_proto(totals) for totals in share.minibatches],
            num_sequences=len(share.sequences),
            replayed=batch.replayed,
        )
        await context.write(training_pb2.PullBatchResponse(header=header))
        for sequence in share.sequences:
            proto = serde.training_sequence_to_proto(sequence)
            await context.write(training_pb2.PullBatchResponse(sequence=proto))
        footer = training_pb2.BatchFooter(num_sequences=len(share.sequences))
        await context.write(training_pb2.PullBatchResponse(footer=footer))

    async def PublishVersion(
        self, request: training_pb2.PublishVersionRequest, context: Context
    ) -> training_pb2.PublishVersionResponse:
        if request.version.run_id and request.version.run_id != self._ring.run_id:
            raise InvalidRequestError(f"version of run {request.version.run_id!r}; this is run {self._ring.run_id!r}")
        newest = await self._side.publish(
            serde.weight_version_from_proto(request.version),
            request.incarnation,
            metrics=dict(request.metrics),
            compute=[serde.interval_from_proto(interval) for interval in request.compute_intervals],
            checkpoint_step=request.checkpoint_step,
            kept_checkpoint_steps=request.kept_checkpoint_steps,
        )
        return training_pb2.PublishVersionResponse(newest_version=newest)


def _command(command: TrainerCommand) -> training_pb2.JoinTrainingResponse:
    match command:
        case PauseTraining():
            return training_pb2.JoinTrainingResponse(pause=training_pb2.PauseTraining())
        case ResumeTraining():
            return training_pb2.JoinTrainingResponse(resume=training_pb2.ResumeTraining())
        case SaveCheckpoint():
            return training_pb2.JoinTrainingResponse(checkpoint=training_pb2.SaveCheckpoint())
        case StopTraining(reason):
            return training_pb2.JoinTrainingResponse(stop=training_pb2.StopTraining(reason=reason))
