"""The trainer's connection to the orchestrator (``TrainingService``): a lease with commands, batches by rank, published versions.

``GrpcLink`` has synchronous calls for the training loop, and runs coroutines in a thread of their own. All calls survive a
restart of the orchestrator: joining, pulling and publishing are idempotent. An error that a retry cannot resolve (a
refused policy, a newer trainer) is kept in ``failure`` and ends all waits. The training loop sees plain records.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
import structlog

from services.common.aio import TaskOwner, backoff, deadline
from services.common.errors import (
    CorruptDataError,
    DeadlineError,
    InfrastructureError,
    LeaseLostError,
    RollmillError,
    SupersededError,
    UserError,
)
from services.common.pb import account_pb2, pool_pb2, training_pb2, training_pb2_grpc, weights_pb2
from services.common.records import (
    NO_TURN,
    DeviceTurn,
    Interval,
    MinibatchTotals,
    RankBatch,
    TrainingSequence,
    WeightVersion,
    by_name,
)
from services.common.rpc.client import channel, refusal_behind, translated_errors
from services.common.security.identity import DEADLINES
from services.common.security.keys import Peer
from services.common.telemetry.accounts import (
    NOBODY,
    ORCHESTRATOR,
    AccountState,
    Activity,
    ActivityName,
    PeerState,
    TimeAccount,
    publisher,
    trainer_component,
)
from services.common.wire import read, write

log = structlog.get_logger()
REPORT_EVERY_S = 2.0
NEXT_PART_S = 30.0  # between two parts of a batch
FIRST_PART_MARGIN_S = 10.0  # the orchestrator answers after its own, shorter deadline
STOP_TIMEOUT_S = 10.0
T = TypeVar("T")


class LoopThread:
    """Runs coroutines for a synchronous thread."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine and return its result. The coroutine bounds its own waits."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def stop(self) -> None:
        """Cancel all tasks and close the loop. The process may exit even if a task ignores the cancellation."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(STOP_TIMEOUT_S)
        if self._thread.is_alive():
            log.warning("loop.still_running", thread=self._thread.name, after_s=STOP_TIMEOUT_S)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:  # which cancels the tasks that are left
            runner.get_loop().run_forever()


@dataclass(slots=True)
class TrainerReport:
    """State of the training loop. The reporting task reads this every two seconds."""

    training_step: int = 0
    state: ActivityName = ActivityName.STARTING
    checkpoint_step: int = 0
    kept_checkpoint_steps: tuple[int, ...] = ()
    device_turn: int = 0  # that is carried out
    refusal: str = ""  # why the batch of ``training_step`` is not trained
    gauges: dict[str, float] = field(default_factory=dict)
    accounts: Callable[[], Sequence[AccountState]] = tuple
    peers: Callable[[], Sequence[PeerState]] = tuple


class GrpcLink:
    """One rank's connection. Only the first rank joins and publishes; the others pull, and report their time accounts.

    The orchestrator's newest commands are kept, and the loop applies them between training steps.
    """

    def __init__(
        self, thread: LoopThread, address: str, run_id: str, policy: str, *, rank: int = 0, num_ranks: int = 1
    ) -> None:
        self._thread = thread
        self._peer = f"orchestrator {address}"
        self._address = address
        self._run_id = run_id
        self.policy = policy
        self.rank = rank
        self._num_ranks = num_ranks
        self.vocab_size = 0  # rows of the model's embedding, sent on joining; 0: unknown
        self._incarnation = uuid.uuid4().hex
        clock = time.pthread_getcpuclockid(threading.main_thread().ident or 0)
        self.account = TimeAccount(  # of the training loop, which runs in the main thread
            trainer_component(policy, rank),
            rest=Activity(ActivityName.STARTING),
            cpu_s=lambda: time.clock_gettime(clock),
        )
        self.report = TrainerReport(accounts=lambda: [self.account.state()])
        self.paused = False
        self.leaving = False  # a signal arrived in this process; the run continues without the process
        self.device_turn = NO_TURN
        self.failure: RollmillError | None = None
        self._stop = False  # from the orchestrator: the run is over
        self._checkpoint_asked = False
        self._newest: training_pb2.PublishVersionRequest | None = None  # the newest version in the ledger
        self._welcomed: Future[int] | None = None  # None: has not joined
        self._turned = threading.Event()  # set by a device turn or a failure
        thread.call(self._open())

    async def _open(self) -> None:
        """Create what belongs to the running loop."""
        self._channel = channel(self._address, Peer.ORCHESTRATOR, self._run_id)
        self._stub = training_pb2_grpc.TrainingServiceStub(self._channel)
        self._tasks = TaskOwner()
        self._interrupt = asyncio.Event()  # set by a command or a failure: waits for batches end
        self._report_due = asyncio.Event()  # set when the next report cannot wait for its time

    def close(self) -> None:
        self._thread.call(self._close())

    async def _close(self) -> None:
        await self._tasks.close()
        await self._channel.close()

    def start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run a background task until this link is closed."""
        self._soon(lambda: self._tasks.start(work, name))

    def _soon(self, call: Callable[[], object]) -> None:
        self._thread.loop.call_soon_threadsafe(call)

    # -- for the training loop ---------------------------------------------------------------------------------------

    def join(self, kept_checkpoint_steps: Sequence[int]) -> int:
        """Join and stay joined in the background; returns the ledger's newest version at the first welcome, -1 for none.

        No deadline: a trainer without an orchestrator has no other work, and its state and log report the wait.

        Raises:
            UserError: the orchestrator refuses this trainer permanently.
        """
        self.set_checkpoint_steps(kept_checkpoint_steps)
        if self._welcomed is None:  # else joined before its model was loaded
            self._welcomed = Future()
            self.start(self._stay_joined(), "trainer.join")
            self.start(self._keep_reporting(), "trainer.report")
        return self._welcomed.result()

    def wait_for_turn(self) -> int:
        """The number of the next own turn on a shared device.

        Raises:
            RollmillError: the orchestrator refuses this trainer permanently.
        """
        while True:
            self._turned.clear()
            if self.failure is not None:
                raise self.failure
            if self.device_turn.yours:
                return self.device_turn.number
            self.set_device_turn(self.device_turn.number)  # this process holds nothing yet
            self._turned.wait()

    def report_as_rank(self) -> None:
        """Report the time account of a rank that does not join, every two seconds."""
        self.start(self._keep_reporting(), "trainer.report")

    def pull(self, training_step: int) -> RankBatch | None:
        """This rank's share of a step's batch; None if not ready, disconnected, or a command is pending: ask again.

        Raises:
            CorruptDataError: the stream ended before the number of sequences in its footer.
        """
        return self._thread.call(self._pull(training_step))

    def publish(self, version: WeightVersion, metrics: Mapping[str, float], intervals: Sequence[Interval]) -> None:
        """Announce a version until the ledger has recorded the version, or until this process must leave.

        No deadline: the run cannot continue without the ledger; the state names the wait. After a leave, the next
        process announces the version.

        Raises:
            VersionConflictError: the ledger has another digest for this number.
            SupersededError: a newer trainer of the policy has taken over.
        """
        request = training_pb2.PublishVersionRequest(
            version=write(version, weights_pb2.WeightVersion(run_id=self._run_id)),
            incarnation=self._incarnation,
            metrics=metrics,
            compute_intervals=[pool_pb2.Interval(start_s=begin, end_s=end) for begin, end in intervals],
            checkpoint_step=self.report.checkpoint_step,
            kept_checkpoint_steps=self.report.kept_checkpoint_steps,
        )
        with self.account.during(ActivityName.ANNOUNCING, on=ORCHESTRATOR):
            self._thread.call(self._publish(request))

    def set_state(self, state: ActivityName, training_step: int) -> None:
        """Report a state. The account waits for the orchestrator where the state is a wait, other ranks for the first."""
        self.report.state, self.report.training_step = state, training_step
        on = NOBODY
        if state is ActivityName.PUBLISHING:
            on = publisher(self.policy)
        elif state in _WAITS:
            on = ORCHESTRATOR if self.rank == 0 else trainer_component(self.policy)
        self.account.enter(state, on=on)

    def set_gauge(self, name: str, value: float) -> None:
        self.report.gauges = {**self.report.gauges, name: value}  # the link's thread reads this

    def set_checkpoint_steps(self, kept: Sequence[int]) -> None:
        self.report.kept_checkpoint_steps = tuple(kept)
        self.report.checkpoint_step = max(kept, default=0)

    def take_checkpoint_command(self) -> bool:
        if not self._checkpoint_asked:
            return False
        self._checkpoint_asked = False  # only one that was seen: the link's thread may set another now
        return True

    def set_device_turn(self, number: int) -> None:
        self.report.device_turn = number
        self._soon(self._report_due.set)

    def refuse(self, reason: str) -> None:
        self.report.refusal = reason
        self._soon(self._report_due.set)

    def leave(self) -> None:
        """End all waits because of a signal, from any thread. The loop leaves after the current step."""
        self.leaving = True
        self._soon(self._update_interrupt)

    @property
    def stopped(self) -> bool:
        """Whether to leave. Raises the orchestrator's refusal of this trainer, if there is one."""
        if self.failure is not None:
            raise self.failure
        return self._stop or self.leaving

    # -- the lease ---------------------------------------------------------------------------------------------------

    async def _stay_joined(self) -> None:
        delays = backoff()
        while True:
            try:
                with translated_errors(self._peer, "JoinTraining"):
                    await self._follow_commands()
                delays = backoff()
            except UserError as error:
                self._give_up(error)
                return
            except LeaseLostError as error:
                if self._is_superseded(error):
                    return
                log.warning("lease.lost", error=error.message)
            except RollmillError as error:
                log.warning("orchestrator.lost", address=self._address, error=error.message)
                if (refused := await refusal_behind(error, self._channel)) is not None:
                    self._give_up(refused)
                    return
            await asyncio.sleep(next(delays))

    def _is_superseded(self, error: LeaseLostError) -> bool:
        """Whether a newer trainer of the policy holds the lease. Joining again would take the lease back, endlessly."""
        if error.metadata.get("holder", self._incarnation) == self._incarnation:
            return False
        self._give_up(SupersededError(f"{error.message}: this trainer leaves the policy to the newer one"))
        return True

    def _give_up(self, error: RollmillError) -> None:
        log.error("trainer.refused", error=error.message)
        self.failure = self.failure or error
        self._turned.set()
        self._update_interrupt()
        if self._welcomed is not None and not self._welcomed.done():
            self._welcomed.set_exception(error)

    async def _follow_commands(self) -> None:
        request = training_pb2.JoinTrainingRequest(
            policy=self.policy,
            incarnation=self._incarnation,
            recovered_version=self.report.checkpoint_step,  # the newest; a restarted orchestrator recovers the others
            num_ranks=self._num_ranks,
            kept_checkpoint_steps=self.report.kept_checkpoint_steps,
            vocab_size=self.vocab_size,
        )
        async for response in self._stub.JoinTraining(request):
            command = response.WhichOneof("command")
            log.info("trainer.command", command=command)
            match command:
                case "welcome":
                    self._take_welcome(response.welcome)
                case "pause":
                    self.paused = True
                case "resume":
                    self.paused = False
                case "checkpoint":
                    self._checkpoint_asked = True
                case "device_turn":
                    self.device_turn = read(DeviceTurn, response.device_turn)
                    self._turned.set()
                case "stop":
                    self._stop = True
            self._update_interrupt()

    def _update_interrupt(self) -> None:
        """Set the event that ends waits for batches while a command or a failure is pending."""
        turned = self.device_turn.number != self.report.device_turn
        ends = self.paused or self._checkpoint_asked or self._stop or self.leaving
        if ends or turned or self.failure is not None:
            self._interrupt.set()
        else:
            self._interrupt.clear()

    def _take_welcome(self, proto: training_pb2.TrainingWelcome) -> None:
        assert self._welcomed is not None
        self.paused = False  # the orchestrator repeats a pause that still holds
        if not self._welcomed.done():
            self._welcomed.set_result(proto.newest_version)
        elif self._newest is not None:
            number, newest = self._newest.version.number, proto.newest_version
            # The ledger has lost a published version: its record was damaged.
            if number > newest or (number == newest and not proto.newest_digest):
                self._tasks.start(self._offer_again(self._newest), "trainer.offer_again")

    async def _offer_again(self, request: training_pb2.PublishVersionRequest) -> None:
        """Publish the newest version again after the ledger lost its record. One attempt: the next welcome asks again."""
        log.warning("version.offered_again", version=request.version.number)
        try:
            await self._send_version(request)
        except RollmillError as error:
            log.warning("version.not_published_yet", version=request.version.number, error=error.message)

    async def _keep_reporting(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REPORT_EVERY_S):
                    await self._report_due.wait()
            self._report_due.clear()
            try:
                with translated_errors(self._peer):
                    await self._report()
            except RollmillError as error:
                # A lost lease or orchestrator also ends the stream of commands, and its task joins again.
                log.debug("report.failed", error=error.message)

    async def _report(self) -> None:
        converted = {
            "accounts": [write(account, account_pb2.TimeAccount()) for account in self.report.accounts()],
            "peers": [write(peer, account_pb2.PeerState()) for peer in self.report.peers()],
        }
        told = {**by_name(self.report), **converted}
        await self._stub.ReportTrainer(
            training_pb2.ReportTrainerRequest(
                policy=self.policy, incarnation=self._incarnation, rank=self.rank, **told
            ),
            timeout=DEADLINES["ReportTrainer"],
        )

    # -- batches and versions ----------------------------------------------------------------------------------------

    async def _pull(self, training_step: int) -> RankBatch | None:
        self._update_interrupt()  # the loop may have applied a command
        request = training_pb2.PullBatchRequest(
            policy=self.policy, training_step=training_step, rank=self.rank, num_ranks=self._num_ranks
        )
        call = self._stub.PullBatch(request)
        pulling = asyncio.ensure_future(self._read_batch(call, training_step))
        interrupt = asyncio.ensure_future(self._interrupt.wait())
        try:
            await asyncio.wait({pulling, interrupt}, return_when=asyncio.FIRST_COMPLETED)
            return pulling.result() if pulling.done() else None
        except (DeadlineError, InfrastructureError) as error:
            log.debug("batch.not_yet", step=training_step, reason=error.reason)
            if isinstance(error, InfrastructureError):
                await asyncio.sleep(next(backoff(0.5)))
            return None
        finally:
            interrupt.cancel()
            pulling.cancel()  # the next call gets the same batch
            call.cancel()

    async def _read_batch(self, call: Any, training_step: int) -> RankBatch:
        """Read a ``PullBatch`` call to its footer. Raises ``CorruptDataError``, and ``DeadlineError`` for a late part."""
        header: training_pb2.BatchHeader | None = None
        sequences: list[TrainingSequence] = []
        limit = (DEADLINES["PullBatch"] or 60.0) + FIRST_PART_MARGIN_S
        with translated_errors(self._peer, "PullBatch"):
            while True:
                async with deadline(limit, f"the next part of batch {training_step}"):
                    response = await call.read()
                if response is grpc.aio.EOF:
                    raise CorruptDataError(f"batch {training_step} ended without a footer")
                part = response.WhichOneof("part")
                if part == "header":
                    header, limit = response.header, NEXT_PART_S
                elif part == "chunk":
                    sequences += [read(TrainingSequence, proto) for proto in response.chunk.sequences]
                elif part == "footer":
                    break
        if header is None or len(sequences) != header.num_sequences:
            expected = header.num_sequences if header else "an unknown number of"
            raise CorruptDataError(f"batch {training_step} brought {len(sequences)} of {expected} sequences")
        return RankBatch(
            policy=self.policy,
            training_step=training_step,
            minibatches=tuple(read(MinibatchTotals, totals) for totals in header.minibatches),
            sequences=tuple(sequences),
        )

    async def _publish(self, request: training_pb2.PublishVersionRequest) -> None:
        for delay in backoff(0.2):
            try:
                await self._send_version(request)
                self._newest = request
                return
            except (InfrastructureError, DeadlineError, LeaseLostError) as error:
                if isinstance(error, LeaseLostError) and self._is_superseded(error):
                    assert self.failure is not None
                    raise self.failure from None
                log.warning("version.not_published_yet", version=request.version.number, error=error.message)
            if self.leaving:
                log.warning("version.left_unpublished", version=request.version.number)
                return
            await asyncio.sleep(delay)

    async def _send_version(self, request: training_pb2.PublishVersionRequest) -> None:
        with translated_errors(self._peer):
            await self._stub.PublishVersion(request, timeout=DEADLINES["PublishVersion"])


_WAITS = (ActivityName.WAITING_FOR_BATCH, ActivityName.REPLAYING, ActivityName.PAUSED, ActivityName.FINISHED)
