"""gRPC service for trainers: converts messages and calls the parts behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

import grpc
import structlog

from services.common.errors import InvalidRequestError
from services.common.pb import training_pb2, training_pb2_grpc
from services.common.records.device_turn import DeviceTurn
from services.common.telemetry.activities import TrainerState
from services.common.telemetry.log_events import LogEvent
from services.common.wire import records as serde
from services.common.wire.accounts import account_from_proto, peer_from_proto
from services.common.wire.batches import batch_chunks, totals_to_proto
from services.orchestrator.members.commands import (
    PauseTraining,
    ResumeTraining,
    SaveCheckpoint,
    StopTraining,
    TrainerCommand,
)
from services.orchestrator.members.device_turns import DeviceTurns
from services.orchestrator.members.trainers import TrainerLeases
from services.orchestrator.rpc import report_bounds as bounds
from services.orchestrator.rpc.trainer_api import TrainerApi
from services.orchestrator.state.versions import VersionLedger

log = structlog.get_logger()

Context = grpc.aio.ServicerContext[Any, Any]

PULL_WAIT_S = 55.0  # below the 60 s that callers allow, so that they hear the reason
PULL_MARGIN_S = 0.5
MOST_CUT_HERE = 1024  # sequences: to cut a share of more takes many milliseconds, and orders and records wait meanwhile
CHUNK_BYTES = 256 * 1024  # of sequences in one message: a message for each sequence costs more than its contents


class TrainingServicer(training_pb2_grpc.TrainingServiceServicer):
    def __init__(
        self,
        run_id: str,
        *,
        api: TrainerApi,
        trainers: TrainerLeases,
        turns: DeviceTurns,
        ledgers: Mapping[str, VersionLedger],
        num_steps: int,
    ) -> None:
        self._api = api
        self._run_id, self._num_steps = run_id, num_steps
        self._ledgers, self._trainers, self._turns = ledgers, trainers, turns

    async def JoinTraining(
        self, request: training_pb2.JoinTrainingRequest, context: Context
    ) -> AsyncIterator[training_pb2.JoinTrainingResponse]:
        bounds.check_id("incarnation", request.incarnation)
        trainer = self._api.join(
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
        ledger = self._ledgers[request.policy]
        try:
            yield training_pb2.JoinTrainingResponse(
                welcome=training_pb2.TrainingWelcome(
                    run_id=self._run_id,
                    newest_version=ledger.newest_number,
                    newest_digest="" if ledger.newest is None else ledger.newest.digest,
                    num_steps=self._num_steps,
                    lease=serde.duration_to_proto(self._trainers.lease_s),
                )
            )
            while (command := await mailbox.get()) is not None:
                yield _command(command)
        finally:
            self._trainers.stream_ended(trainer, mailbox)
            log.info("trainer.stream_ended", policy=request.policy)

    async def ReportTrainer(
        self, request: training_pb2.ReportTrainerRequest, context: Context
    ) -> training_pb2.ReportTrainerResponse:
        accounts = bounds.accounts(account_from_proto(account) for account in request.accounts)
        bounds.check_number("rank", request.rank, 0, bounds.MOST_RANKS)
        if request.rank > 0:
            self._trainers.report_rank(request.policy, request.rank, accounts)
            return training_pb2.ReportTrainerResponse(lease=serde.duration_to_proto(self._trainers.lease_s))
        self._trainers.report(
            request.policy,
            request.incarnation,
            training_step=bounds.check_number("training_step", request.training_step, 0),
            state=request.state[: bounds.MOST_NAME],
            checkpoint_step=self._checkpoint_step(request.policy, request.checkpoint_step),
            gauges=bounds.gauges(request.gauges),
            kept_checkpoint_steps=self._kept_steps(request.policy, request.kept_checkpoint_steps),
            accounts=accounts,
            peers=bounds.peers(peer_from_proto(peer) for peer in request.peers),
            device_turn=request.device_turn,
        )
        if request.state == TrainerState.FINISHED:
            self._turns.trainer_finished(request.policy)
        self._turns.settle()
        return training_pb2.ReportTrainerResponse(lease=serde.duration_to_proto(self._trainers.lease_s))

    def _checkpoint_step(self, policy: str, step: int) -> int:
        """The newest checkpoint, at most the newest version: retention may delete records up to a checkpoint.

        A checkpoint is ahead of the ledger when the record of its version is lost.
        """
        return min(bounds.check_number(f"checkpoint_step of {policy}", step, 0), max(self._newest(policy), 0))

    def _newest(self, policy: str) -> int:
        return self._ledgers[self._trainers.known(policy)].newest_number

    def _kept_steps(self, policy: str, steps: Iterable[int]) -> tuple[int, ...]:
        """The possible ones of the kept checkpoints; an empty result keeps every record."""
        newest = self._newest(policy)
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
        batch = await self._api.pull_batch(request.policy, request.training_step, wait_s)
        log.info(
            LogEvent.BATCH_PULLED,
            policy=request.policy,
            step=request.training_step,
            rank=request.rank,
            num_ranks=request.num_ranks,
            recorded_before=batch.replayed,
        )
        if len(batch.record.entries) > MOST_CUT_HERE:
            share = await asyncio.to_thread(batch.share, request.rank, request.num_ranks)
        else:
            share = batch.share(request.rank, request.num_ranks)
        header = training_pb2.BatchHeader(
            training_step=share.training_step,
            minibatches=[totals_to_proto(totals) for totals in share.minibatches],
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
        if request.version.run_id and request.version.run_id != self._run_id:
            raise InvalidRequestError(f"version of run {request.version.run_id!r}; this is run {self._run_id!r}")
        newest = await self._api.publish(
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
        case DeviceTurn():
            return training_pb2.JoinTrainingResponse(device_turn=serde.device_turn_to_proto(command))
