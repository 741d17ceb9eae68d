"""The trainer's side of ``TrainingService``: a lease with commands, batches by rank, published versions.

Everything here is asynchronous and survives an orchestrator that goes away and comes back: joining again,
asking again and publishing again are all idempotent. What cannot be mended by trying again (a refused policy, another
trainer that took over) is kept in ``failure``, and whoever waits is let go. The training loop sees plain records.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from services.common.accounts import AccountState, PeerState
from services.common.aio import TaskOwner, backoff
from services.common.errors import (
    DeadlineError,
    InfrastructureError,
    LeaseLostError,
    MillraceError,
    SupersededError,
    UserError,
)
from services.common.pb import training_pb2, training_pb2_grpc
from services.common.rpc.channel import DEADLINES, call_metadata, channel, translated_errors
from services.common.rpc.refusals import refusal_behind
from services.common.rpc.streams import call_cancellation_is_an_error
from services.common.security.roles import Peer
from services.common.serde import interval_to_proto, timestamp_to_proto, weight_version_to_proto
from services.common.serde_accounts import account_to_proto, peer_to_proto
from services.common.types import Interval, RankBatch, WeightVersion
from services.trainer.batch_stream import read_batch

log = structlog.get_logger()

REPORT_EVERY_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """Where the run stands for this policy."""

    newest_version: int  # -1 when none is published
    newest_digest: str
    num_steps: int


@dataclass(slots=True)
class TrainerReport:
    """What the loop is doing; read every two seconds by the reporting task."""

    training_step: int = 0
    state: str = "starting"
    checkpoint_step: int = 0
    kept_checkpoint_steps: tuple[int, ...] = ()
    gauges: dict[str, float] = field(default_factory=dict)
    accounts: Callable[[], Sequence[AccountState]] = tuple
    peers: Callable[[], Sequence[PeerState]] = tuple


@dataclass(slots=True)
class Commands:
    """The newest word of the orchestrator; taken between training steps."""

    paused: bool = False
    checkpoint: bool = False
    stop: bool = False  # the orchestrator's word: the run is over
    leave: bool = False  # this process's own: a signal came, the run goes on without it


def _is_lost(number: int, welcome: training_pb2.TrainingWelcome) -> bool:
    """Whether a version that the ledger has taken is not there any more: its record was damaged."""
    return number > welcome.newest_version or (number == welcome.newest_version and not welcome.newest_digest)


class OrchestratorClient:
    """One rank's connection. Only the first rank joins, reports and publishes."""

    def __init__(self, address: str, run_id: str, policy: str, num_ranks: int) -> None:
        self._address = address
        self._run_id = run_id
        self.policy = policy
        self._num_ranks = num_ranks
        self.vocab_size = 0  # rows of the model's embedding, told when it joins; 0: not known
        self._rank = 0
        self._incarnation = uuid.uuid4().hex
        self._channel = channel(address, Peer.ORCHESTRATOR)
        self._stub = training_pb2_grpc.TrainingServiceStub(self._channel)
        self._tasks = TaskOwner()
        self._welcomed: asyncio.Future[Welcome] | None = None
        self._joined: asyncio.Task[None] | None = None
        self._held_up = asyncio.Event()  # pause, stop, leave or failure: waits for batches end
        self.failure: MillraceError | None = None
        self.commands = Commands()
        self._newest: training_pb2.PublishVersionRequest | None = None  # that the ledger has taken
        self.report = TrainerReport()

    # -- the lease ---------------------------------------------------------------------------------------------------

    async def join(self, checkpoint_step: int, kept_checkpoint_steps: Sequence[int] = ()) -> Welcome:
        """Join and stay joined in the background; returns the first welcome, however long the orchestrator takes.

        Not bounded: a trainer without an orchestrator has nothing else to do, and says so in its state and its log.

        Raises:
            UserError: the orchestrator refuses this trainer, and always will.
        """
        self.report.checkpoint_step = checkpoint_step
        self.report.kept_checkpoint_steps = tuple(kept_checkpoint_steps)
        self._welcomed = asyncio.get_running_loop().create_future()
        self._tasks.start(self._stay_joined(), "trainer.join")
        self._tasks.start(self._keep_reporting(), "trainer.report")
        return await self._welcomed

    def report_as_rank(self, rank: int) -> None:
        """Say every two seconds where this rank's time goes; for the ranks that do not join."""
        self._rank = rank
        self._tasks.start(self._keep_reporting(), "trainer.report")

    def start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run something beside, until this client is closed."""
        self._tasks.start(work, name)

    def leave(self) -> None:
        """End waits: this process was told to go. The loop leaves after the step at hand."""
        self.commands.leave = True
        self._heed()

    async def _stay_joined(self) -> None:
        delays = backoff()
        while True:
            try:
                with translated_errors(self._peer), call_cancellation_is_an_error("JoinTraining"):
                    await self._follow_commands()
                delays = backoff()
            except UserError as error:
                self._give_up(error)
                return
            except LeaseLostError as error:
                if self._is_superseded(error):
                    return
                log.warning("lease.lost", error=error.message)
            except MillraceError as error:
                log.warning("orchestrator.lost", address=self._address, error=error.message)
                if (refused := await refusal_behind(error, self._channel)) is not None:
                    self._give_up(refused)
                    return
            await asyncio.sleep(next(delays))

    def _is_superseded(self, error: LeaseLostError) -> bool:
        """Whether a newer trainer of the policy holds the lease: joining again would only take it back, for ever."""
        if error.metadata.get("holder", self._incarnation) == self._incarnation:
            return False
        self._give_up(SupersededError(f"{error.message}: this one leaves the policy to it"))
        return True

    def _give_up(self, error: MillraceError) -> None:
        log.error("trainer.refused", error=error.message)
        self.failure = self.failure or error
        self._heed()
        if self._welcomed is not None and not self._welcomed.done():
            self._welcomed.set_exception(error)

    async def _follow_commands(self) -> None:
        request = training_pb2.JoinTrainingRequest(
            policy=self.policy,
            incarnation=self._incarnation,
            recovered_version=self.report.checkpoint_step,  # the newest: an orchestrator that restarted keeps the rest
            num_ranks=self._num_ranks,
            kept_checkpoint_steps=self.report.kept_checkpoint_steps,
            vocab_size=self.vocab_size,
        )
        async for response in self._stub.JoinTraining(request, metadata=call_metadata(self._run_id)):
            command = response.WhichOneof("command")
            log.info("trainer.command", command=command)
            match command:
                case "welcome":
                    self._take_welcome(response.welcome)
                case "pause":
                    self.commands.paused = True
                case "resume":
                    self.commands.paused = False
                case "checkpoint":
                    self.commands.checkpoint = True
                case "stop":
                    self.commands.stop = True
            self._heed()

    def _heed(self) -> None:
        """Let waits for batches end while there is a reason not to train."""
        if self.commands.paused or self.commands.stop or self.commands.leave or self.failure is not None:
            self._held_up.set()
        else:
            self._held_up.clear()

    def _take_welcome(self, proto: training_pb2.TrainingWelcome) -> None:
        assert self._welcomed is not None
        self.commands.paused = False  # a pause that still holds is said again
        if not self._welcomed.done():
            self._welcomed.set_result(
                Welcome(
                    newest_version=proto.newest_version,
                    newest_digest=proto.newest_digest,
                    num_steps=proto.num_steps,
                )
            )

        elif self._newest is not None and _is_lost(self._newest.version.number, proto):
            self._tasks.start(self._offer_again(self._newest), "trainer.offer_again")

    async def _offer_again(self, request: training_pb2.PublishVersionRequest) -> None:
        """The ledger lost the record of its newest version. Once: an orchestrator that goes away asks at the next welcome."""
        log.warning("version.offered_again", version=request.version.number)
        try:
            with translated_errors(self._peer):
                await self._stub.PublishVersion(
                    request, timeout=DEADLINES["PublishVersion"], metadata=call_metadata(self._run_id)
                )
        except MillraceError as error:
            log.warning("version.not_published_yet", version=request.version.number, error=error.message)

    async def _keep_reporting(self) -> None:
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            try:
                with translated_errors(self._peer):
                    await self._report()
            except MillraceError as error:
                # A lost lease or orchestrator ends the stream of commands too, which joins again.
                log.debug("report.failed", error=error.message)

    async def _report(self) -> None:
        await self._stub.ReportTrainer(
            training_pb2.ReportTrainerRequest(
                policy=self.policy,
                incarnation=self._incarnation,
                training_step=self.report.training_step,
                state=self.report.state,
                checkpoint_step=self.report.checkpoint_step,
                kept_checkpoint_steps=self.report.kept_checkpoint_steps,
                gauges=self.report.gauges,
                rank=self._rank,
                accounts=[account_to_proto(account) for account in self.report.accounts()],
                peers=[peer_to_proto(peer) for peer in self.report.peers()],
            ),
            timeout=DEADLINES["ReportTrainer"],
            metadata=call_metadata(self._run_id),
        )

    # -- batches -----------------------------------------------------------------------------------------------------

    async def pull(self, training_step: int, rank: int) -> RankBatch | None:
        """This rank's share of a step's batch; None when there is none yet, nobody to ask, or a word to heed: ask again.

        Raises:
            CorruptDataError: the stream ended before its footer's count was reached.
        """
        pulling = asyncio.ensure_future(self._pull_or_none(training_step, rank))
        word = asyncio.ensure_future(self._held_up.wait())
        try:
            await asyncio.wait({pulling, word}, return_when=asyncio.FIRST_COMPLETED)
            return pulling.result() if pulling.done() else None
        finally:
            word.cancel()
            pulling.cancel()  # asking again brings the same batch

    async def _pull_or_none(self, training_step: int, rank: int) -> RankBatch | None:
        try:
            with translated_errors(self._peer), call_cancellation_is_an_error("PullBatch"):
                return await self._pull(training_step, rank)
        except (DeadlineError, InfrastructureError) as error:
            log.debug("batch.not_yet", step=training_step, reason=error.reason)
            if isinstance(error, InfrastructureError):
                await asyncio.sleep(next(backoff(0.5)))
            return None

    async def _pull(self, training_step: int, rank: int) -> RankBatch:
        request = training_pb2.PullBatchRequest(
            policy=self.policy, training_step=training_step, rank=rank, num_ranks=self._num_ranks
        )
        call = self._stub.PullBatch(request, metadata=call_metadata(self._run_id))
        try:
            return await read_batch(call, self.policy, training_step)
        finally:
            call.cancel()

    # -- versions ----------------------------------------------------------------------------------------------------

    async def publish(
        self,
        version: WeightVersion,
        metrics: Mapping[str, float],
        compute_intervals: Sequence[Interval],
        finished_at: float,
    ) -> None:
        """Announce a version until the ledger has it, or until this process is told to leave (its successor does it).

        Not bounded by itself: without the ledger the run cannot go on; the state says what is waited for.

        Raises:
            VersionConflictError: the ledger knows another digest for this number.
            SupersededError: a newer trainer of the policy has taken over.
        """
        request = training_pb2.PublishVersionRequest(
            version=weight_version_to_proto(version, self._run_id),
            incarnation=self._incarnation,
            metrics=metrics,
            compute_intervals=[interval_to_proto(interval) for interval in compute_intervals],
            checkpoint_step=self.report.checkpoint_step,
            kept_checkpoint_steps=self.report.kept_checkpoint_steps,
            finished_at=timestamp_to_proto(finished_at),
        )
        for delay in backoff(0.2):
            try:
                with translated_errors(self._peer):
                    await self._stub.PublishVersion(
                        request, timeout=DEADLINES["PublishVersion"], metadata=call_metadata(self._run_id)
                    )
                self._newest = request
                return
            except LeaseLostError as error:
                if self._is_superseded(error):
                    assert self.failure is not None
                    raise self.failure from None
                log.warning("version.not_published_yet", version=version.number, error=error.message)
            except (InfrastructureError, DeadlineError) as error:
                log.warning("version.not_published_yet", version=version.number, error=error.message)
            if self.commands.leave:
                log.warning("version.left_unpublished", version=version.number)
                return
            await asyncio.sleep(delay)

    async def close(self) -> None:
        await self._tasks.close()
        await self._channel.close()

    @property
    def _peer(self) -> str:
        return f"orchestrator {self._address}"
