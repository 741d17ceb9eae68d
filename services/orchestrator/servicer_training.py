"""The membrane to trainers: convert, call the ring, convert."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
import structlog

from services.common import serde
from services.common.errors import InvalidRequestError
from services.common.pb import training_pb2, training_pb2_grpc
from services.common.serde_accounts import account_from_proto, peer_from_proto
from services.orchestrator import report_bounds as bounds
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
        bounds.check_id("incarnation", request.incarnation)
        ring = self._ring
        trainer = self._side.join(
            request.policy,
            request.incarnation,
            max(bounds.check_number("num_ranks", request.num_ranks, 0, bounds.MOST_RANKS), 1),
            bounds.check_number("recovered_version", request.recovered_version, -1),
            bounds.texts(request.labels),
            self._kept_steps(request.policy, request.kept_checkpoint_steps),
            bounds.check_number("vocab_size", request.vocab_size, 0, bounds.MOST_ROWS),
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
        accounts = bounds.accounts(account_from_proto(account) for account in request.accounts)
        bounds.check_number("rank", request.rank, 0, bounds.MOST_RANKS)
        if request.rank > 0:
            self._ring.trainers.report_rank(request.policy, request.rank, accounts)
            return training_pb2.ReportTrainerResponse(lease=serde.duration_to_proto(self._ring.trainers.lease_s))
        self._ring.trainers.report(
            request.policy,
            request.incarnation,
            training_step=bounds.check_number("training_step", request.training_step, 0),
            state=request.state[: bounds.MOST_NAME],
            checkpoint_step=self._checkpoint_step(request.policy, request.checkpoint_step),
            gauges=bounds.gauges(request.gauges),
            kept_checkpoint_steps=self._kept_steps(request.policy, request.kept_checkpoint_steps),
            accounts=accounts,
            peers=bounds.peers(peer_from_proto(peer) for peer in request.peers),
        )
        return training_pb2.ReportTrainerResponse(lease=serde.duration_to_proto(self._ring.trainers.lease_s))

    def _checkpoint_step(self, policy: str, step: int) -> int:
        """The newest checkpoint, at most the newest version: what is recorded up to a checkpoint may be collected.

        A checkpoint is ahead of the ledger when the record of its version is lost.
        """
        newest = self._ring.ledgers[self._ring.trainers.known(policy)].newest_number
        return min(bounds.check_number(f"checkpoint_step of {policy}", step, 0), max(newest, 0))

    def _kept_steps(self, policy: str, steps: Iterable[int]) -> tuple[int, ...]:
        """Of the kept checkpoints those that can be; none of them keeps every record."""
        newest = self._ring.ledgers[self._ring.trainers.known(policy)].newest_number
        fitting = tuple(step for step in steps if 0 <= step <= newest)
        return fitting if len(fitting) <= bounds.MOST_VALUES else ()

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
            bounds.check_version(serde.weight_version_from_proto(request.version)),
            request.incarnation,
            metrics=bounds.metrics(request.metrics),
            compute=bounds.intervals(serde.interval_from_proto(interval) for interval in request.compute_intervals),
            checkpoint_step=self._checkpoint_step(request.version.policy, request.checkpoint_step),
            kept_checkpoint_steps=self._kept_steps(request.version.policy, request.kept_checkpoint_steps),
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
