"""One replica in the pool: applies commands to the player and the weights, and reports."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import grpc
import structlog

from services.common.aio import backoff, deadline
from services.common.errors import (
    AccessError,
    DeadlineError,
    InfrastructureError,
    LeaseLostError,
    RollmillError,
    UserError,
)
from services.common.pb import account_pb2, pool_pb2, pool_pb2_grpc, weights_pb2
from services.common.prometheus import Metric
from services.common.records import (
    NO_TURN,
    DeviceTurn,
    FetchPlan,
    Interval,
    TaskGroupOrder,
    WeightTransfer,
    WeightVersion,
    by_name,
)
from services.common.rpc.client import REPORT_ANSWER_S, refusal_behind, translated_errors
from services.common.rpc.run_client import AWAY_S
from services.common.telemetry.accounts import (
    ORCHESTRATOR,
    AccountState,
    ActivityName,
    PeerState,
    TimeAccount,
    part,
    weights,
)
from services.common.telemetry.logs import LogEvent
from services.common.wire import read, read_seconds, write
from services.inference.gateway import GatewayClient
from services.inference.loading import LoadedPolicy
from services.inference.records_out import TrajectorySender
from services.inference.rollouts import RolloutPlayer

# --- Carries out device turns in a replica: frees the memory of its engines, or fills it again from the mirrors.


log = structlog.get_logger(__name__)


class EngineTurns:
    """``offer`` takes commands, ``run`` carries them out. The clocks of ``rollouts`` stand still while the device is free."""

    def __init__(self, policies: Mapping[str, LoadedPolicy], rollouts: RolloutPlayer) -> None:
        self._policies = policies
        self._rollouts = rollouts
        self._wanted = NO_TURN
        self._changed = asyncio.Event()
        self._is_freed = False
        self.done = NO_TURN  # the newest turn that is carried out
        self.on_done: Callable[[], None] = lambda: None

    def offer(self, turn: DeviceTurn) -> None:
        """Take a command; a newer one replaces those that are not carried out yet."""
        self._wanted = turn
        self._changed.set()

    async def run(self) -> None:
        """Without a deadline: a turn lasts as long as its holder needs. Each call of an engine has its own.

        Raises:
            DeadlineError, InfrastructureError: an engine did not free or fill its memory; the process must end.
        """
        while True:
            await self._changed.wait()
            self._changed.clear()
            turn = self._wanted
            if turn.number == self.done.number:
                continue
            await (self._fill() if turn.yours else self.free())
            self.done = turn
            self.on_done()

    async def free(self) -> None:
        """Free the memory of the engines; also of those that have just been loaded, until the first own turn."""
        if self._is_freed:
            return
        began = time.monotonic()
        self._is_freed = True
        self._rollouts.stand_still()
        for loaded in self._policies.values():
            await loaded.weights.release()
        log.info("engine.freed", seconds=round(time.monotonic() - began, 3))

    async def _fill(self) -> None:
        if not self._is_freed:
            return
        began = time.monotonic()
        for loaded in self._policies.values():
            await loaded.weights.restore()
        self._rollouts.go_on()
        self._is_freed = False
        log.info("engine.filled", seconds=round(time.monotonic() - began, 3))


# --- The identity of a replica.


Call = grpc.aio.StreamStreamCall[pool_pb2.StreamReportsRequest, pool_pb2.StreamReportsResponse]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaIdentity:
    """Identity of the joining replica. ``incarnation`` is new for every start of the process."""

    replica_id: str
    incarnation: str
    num_slots: int
    weights_address: str = ""  # where the replica relays weights; empty: no relay


# --- Records the time intervals in which an engine samples tokens, for the report to the orchestrator.


JOIN_GAP_S = 0.05  # pauses shorter than this belong to the interval: a decoding step of a busy machine
STEP_TIMES = 4.0  # and those shorter than so many decoding steps: one of a large model on a CPU takes seconds
MAX_JOIN_GAP_S = 10.0  # longer than any decoding step: where answers have one token, all gaps are pauses
_GAPS = 16  # their lower quartile is the duration of a step: most gaps are one, some are pauses


class EmissionLog:
    """The intervals in which tokens came."""

    def __init__(self, join_gap_s: float = JOIN_GAP_S) -> None:
        self._join_gap_s = join_gap_s
        self._gaps: deque[float] = deque([0.0] * _GAPS, maxlen=_GAPS)
        self._lock = threading.Lock()
        self._closed: list[Interval] = []
        self._begin: float | None = None
        self._end = 0.0

    def on_tokens(self, num_tokens: int, at: float) -> None:
        """Record that ``num_tokens`` were sampled at the time ``at``."""
        with self._lock:
            gap = at - self._end
            joined = gap < max(self._join_gap_s, min(MAX_JOIN_GAP_S, STEP_TIMES * sorted(self._gaps)[_GAPS // 4]))
            if self._begin is None:
                # An interval that goes on after a report begins where the reported part ended.
                self._begin = self._end if gap >= 0 and joined else at
            elif not joined:
                self._closed.append((self._begin, self._end))
                self._begin = at
            self._gaps.append(gap)
            self._end = max(self._end, at)

    def take(self) -> list[Interval]:
        """The intervals since the last call, in order."""
        with self._lock:
            taken, self._closed = self._closed, []
            if self._begin is not None:
                taken.append((self._begin, self._end))
                self._begin = None
            return taken


# --- Membership in the orchestrator's pool: the stream of commands and the report that renews the lease.


REPORT_PERIOD_S = 2.0
MOST_PERIOD_S = 10.0  # that the orchestrator may ask for: a lease is 30 s
_ENGINE_CHECK_S = 1.0
_TAKEOVERS = 3  # within _TAKEOVER_WINDOW_S: another process claims this replica id
_TAKEOVER_WINDOW_S = 60.0


class Replica:
    """A member of the pool: carries out the orchestrator's commands, and reports. ``run`` ends when the replica has been
    drained and ``leave`` was called; raises when membership is refused."""

    def __init__(
        self,
        connection: grpc.aio.Channel,
        identity: ReplicaIdentity,
        *,
        policies: Mapping[str, LoadedPolicy],
        player: RolloutPlayer,
        gateway: GatewayClient,
        emissions: EmissionLog,
        account: TimeAccount,
        turns: EngineTurns | None = None,
        more_accounts: Iterable[TimeAccount] = (),
        gateway_state: Callable[[], PeerState | None] = lambda: None,
        report_period_s: float = REPORT_PERIOD_S,
        away_timeout_s: float = AWAY_S,
    ) -> None:
        """``account`` is the slots' time account; ``more_accounts`` are reported too, as are the weights' accounts."""
        self._policies = policies
        self._player = player
        self._gateway = gateway
        self._emissions = emissions
        self._account = account
        self._turns = turns or EngineTurns(policies, player)
        self._more_accounts = tuple(more_accounts)
        self._gateway_state = gateway_state
        self.drain_requested = asyncio.Event()
        self._connection = connection
        self._stub: pool_pb2_grpc.PoolServiceAsyncStub = pool_pb2_grpc.PoolServiceStub(connection)
        self._identity = identity
        self._least_period_s = report_period_s
        self.report_period_s = report_period_s  # set by the orchestrator
        self._away_timeout_s = away_timeout_s
        self._reports: Call | None = None  # the stream of reports, without an unanswered one
        self._call: grpc.aio.UnaryStreamCall[pool_pb2.JoinPoolRequest, pool_pb2.JoinPoolResponse] | None = None
        self._welcomed = asyncio.Event()
        self._left = asyncio.Event()
        self._woken = asyncio.Event()  # a report may be urgent
        for loaded in policies.values():
            loaded.weights.on_held = self._woken.set
        self._turns.on_done = self._woken.set
        self._last_answer_at = time.monotonic()
        self._unreported: list[tuple[float, float]] = []  # intervals whose report did not arrive
        self._transfers: list[WeightTransfer] = []  # the same of weight transfers
        self._reported: tuple[Any, ...] = ()  # versions and device turn of the last report
        self._takeovers: list[float] = []

    async def run(self) -> None:
        reports = asyncio.create_task(self._report_loop(), name="replica reports")
        joins = asyncio.create_task(self._join_loop(), name="pool membership")
        try:
            # Each loop ends by itself after `leave`, or with the error that ends membership.
            done, _ = await asyncio.wait({reports, joins}, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            for task in (reports, joins):
                task.cancel()
            await asyncio.gather(reports, joins, return_exceptions=True)
            if self._reports is not None:
                self._reports.cancel()

    def leave(self) -> None:
        """Send a last report and end ``run``."""
        self._left.set()
        self._woken.set()
        if self._call is not None:
            self._call.cancel()

    # -- commands in --------------------------------------------------------------------------------------------

    async def _join_loop(self) -> None:
        delays = backoff()
        while not self._left.is_set():
            self._welcomed.clear()
            try:
                await self._one_stream()
                if self.drain_requested.is_set():
                    await self._left.wait()  # reports go on; the drain task calls leave after the last rollouts
                    return
                log.info("pool.stream_ended")
            except LeaseLostError as error:
                self._lease_lost(error)
            except UserError:
                raise  # this replica is refused: joining again would be refused again
            except RollmillError as error:
                if not self._left.is_set():
                    log.warning("pool.stream_broke", error=error.message)
                    if (refused := await refusal_behind(error, self._connection)) is not None:
                        raise refused from None
            if self._welcomed.is_set():
                delays = backoff()
            away_s = time.monotonic() - self._last_answer_at
            if away_s > self._away_timeout_s:
                raise DeadlineError(
                    f"the orchestrator has been away for {away_s:.0f} s (limit {self._away_timeout_s:.0f} s)"
                )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(next(delays)):
                    await self._left.wait()

    async def _one_stream(self) -> None:
        request = pool_pb2.JoinPoolRequest(
            **by_name(self._identity),
            held_versions=[write(v, pool_pb2.HeldVersion()) for v in self._held_versions()],
            running_task_group_ids=self._player.running_task_group_ids,
        )
        call = self._call = self._stub.JoinPool(request)
        try:
            with translated_errors("orchestrator", "JoinPool"):
                async for response in call:
                    self._last_answer_at = time.monotonic()
                    self._apply_command(response)
        finally:
            self._call = None
            call.cancel()

    def _apply_command(self, response: pool_pb2.JoinPoolResponse) -> None:
        command = response.WhichOneof("command")
        if command == "welcome":
            log.info("pool.joined", replica=self._identity.replica_id, run=response.welcome.run_id)
            self._gateway.connect(response.welcome.envgateway_address)
            self._welcomed.set()
            self._woken.set()
        elif command == "run_task_group":
            ordered = response.run_task_group
            try:
                self._player.play(read(TaskGroupOrder, ordered))
            except RollmillError as error:  # a faulty order: its slots fail, membership and other orders go on
                log.error("pool.unreadable_order", task_group=ordered.task_group_id, error=error.message)
                self._player.refuse(ordered.task_group_id, tuple(ordered.indices), error)
        elif command == "cancel_task_group":
            cancelled = response.cancel_task_group
            ended = self._player.cancel(cancelled.task_group_id)
            log.info(
                LogEvent.TASK_GROUP_CANCELLED,
                task_group=cancelled.task_group_id,
                rollouts=ended,
                reason=cancelled.reason,
            )
        elif command == "new_version":
            announced = response.new_version
            version = read(WeightVersion, announced.version)
            if (loaded := self._policies.get(version.policy)) is not None:  # else served by other replicas
                plan = read(FetchPlan, announced.plan) if announced.HasField("plan") else None
                loaded.weights.offer(version, plan)
        elif command == "device_turn":
            self._turns.offer(read(DeviceTurn, response.device_turn))
        elif command == "drain":
            log.info("replica.draining", reason=response.drain.reason)
            self.drain_requested.set()
        else:
            log.warning("pool.unknown_command")  # a newer orchestrator: unknown commands are ignored

    def _lease_lost(self, error: LeaseLostError) -> None:
        """Join again after a lost lease; raises ``LeaseLostError`` if another process took the lease several times."""
        log.warning("pool.lease_lost", error=error.message)
        if error.metadata.get("holder", self._identity.incarnation) == self._identity.incarnation:
            return
        now = time.monotonic()
        self._takeovers = [at for at in self._takeovers if now - at < _TAKEOVER_WINDOW_S] + [now]
        if len(self._takeovers) >= _TAKEOVERS:
            raise LeaseLostError(
                f"replica {self._identity.replica_id!r} was taken over {_TAKEOVERS} times within "
                f"{_TAKEOVER_WINDOW_S:.0f} s: another process uses the same --replica-id; stop one of the two"
            ) from error

    # -- reports out --------------------------------------------------------------------------------------------

    async def _report_loop(self) -> None:
        answered = True
        while not self._left.is_set():
            if self._welcomed.is_set() or self.drain_requested.is_set():
                answered = await self._report(warn=answered)
            # The next one is due after the period, or when it is urgent: after the welcome, at a new version, or at the end. A
            # replica whose reported version is too old gets no work, so a swap is reported at once.
            joined = self._welcomed.is_set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.report_period_s):
                    while not self._left.is_set() and not (
                        (self._held_versions(), self._turns.done.number) != self._reported
                        if joined
                        else self._welcomed.is_set()
                    ):
                        self._woken.clear()
                        await self._woken.wait()
        await self._report(warn=False)

    async def _report(self, *, warn: bool) -> bool:
        held, turn = self._held_versions(), self._turns.done.number
        self._reported = held, turn
        self._unreported += self._emissions.take()
        for loaded in self._policies.values():
            self._transfers += loaded.weights.take_transfers()
        peer = self._gateway_state()
        report = pool_pb2.StreamReportsRequest(
            replica_id=self._identity.replica_id,
            incarnation=self._identity.incarnation,
            held_versions=[write(version, pool_pb2.HeldVersion()) for version in held],
            running_task_group_ids=self._player.running_task_group_ids,
            num_generated_tokens=self._num_generated(),
            emission_intervals=[pool_pb2.Interval(start_s=begin, end_s=end) for begin, end in self._unreported],
            weight_transfers=[write(transfer, weights_pb2.WeightTransfer()) for transfer in self._transfers],
            accounts=[write(account, account_pb2.TimeAccount()) for account in self.accounts()],
            peers=[] if peer is None else [write(peer, account_pb2.PeerState())],
            device_turn=turn,
        )
        try:
            answer = await self._send(report)
        except LeaseLostError:
            if self._call is not None and not self.drain_requested.is_set():
                self._call.cancel()  # the join loop joins again
            return True
        except AccessError:
            raise  # this replica is refused, or is no longer a member
        except RollmillError as error:
            if warn:
                log.warning("pool.report_failed", error=error.message)
            return False
        self._last_answer_at = time.monotonic()
        asked_s = min(read_seconds(answer.next_report), MOST_PERIOD_S)
        self.report_period_s = max(self._least_period_s, asked_s)
        self._unreported.clear()
        self._transfers.clear()
        return True

    async def _send(self, report: pool_pb2.StreamReportsRequest) -> pool_pb2.StreamReportsResponse:
        """The answer to a report, over one stream for all; another one is opened after a failure.

        Raises:
            RollmillError: the orchestrator's refusal, such as ``LeaseLostError``; ``InfrastructureError`` for a broken
                stream; ``DeadlineError`` without an answer in time.
        """
        call, self._reports = self._reports, None
        if call is None or call.done():  # broken or ended since the last answer
            call = self._stub.StreamReports(wait_for_ready=True)
        try:
            with translated_errors("orchestrator", "StreamReports"):
                async with deadline(REPORT_ANSWER_S, "the orchestrator's answer to a report"):
                    await call.write(report)
                    response = await call.read()
            if not isinstance(response, pool_pb2.StreamReportsResponse):
                raise InfrastructureError("the orchestrator has ended the stream of reports")
        except BaseException:
            call.cancel()
            raise
        self._reports = call
        return response

    # -- state --------------------------------------------------------------------------------------------------

    def _held_versions(self) -> tuple[WeightVersion, ...]:
        return tuple(loaded.weights.held() for loaded in self._policies.values())

    def _num_generated(self) -> int:
        return sum(loaded.served.engine.health().generated_tokens for loaded in self._policies.values())

    def accounts(self) -> tuple[AccountState, ...]:
        """Time accounts of the slots, of each policy's weights, and of records in transit."""
        self._account.set_progress(self._num_generated())
        first = [name for name, loaded in self._policies.items() if loaded.weights.held().number < 0]
        if self.drain_requested.is_set():
            self._account.rest(ActivityName.DRAINING)
        elif first:
            missing = part(self._account.component, weights(first[0]))
            self._account.rest(ActivityName.WAITING_FOR_FIRST_WEIGHTS, missing)
        else:
            self._account.rest(ActivityName.WAITING_FOR_TASK_GROUPS, ORCHESTRATOR)
        of_weights = (loaded.weights.account.state() for loaded in self._policies.values())
        return (
            self._account.state(),
            *(replace(state, component=part(self._account.component, state.component)) for state in of_weights),
            *(account.state() for account in self._more_accounts),
        )

    async def watch_engines(self) -> None:
        """Raise ``InfrastructureError`` when an engine has died: the process must restart."""
        while True:
            await asyncio.sleep(_ENGINE_CHECK_S)
            for name, loaded in self._policies.items():
                health = loaded.served.engine.health()
                if not health.ok:
                    raise InfrastructureError(f"the engine of policy {name} died: {health.detail}")


# --- Gauges of a replica's process, for its status and its report, and their names as metrics.


METRICS = (
    Metric("rollmill_tokens_generated_total", "counter", "Tokens sampled since the process started.", "tokens_generated/{policy}"),
    Metric("rollmill_engine_requests_running", "gauge", "Requests that an engine generates now.", "requests_running/{policy}"),
    Metric("rollmill_engine_requests_waiting", "gauge", "Requests that wait in an engine.", "requests_waiting/{policy}"),
    Metric("rollmill_engine_kv_blocks", "gauge", "Blocks of a paged KV cache that requests can hold.", "kv_blocks/{policy}"),
    Metric("rollmill_engine_kv_blocks_used", "gauge", "Blocks held by running requests and by cached prefixes.", "kv_used/{policy}"),
    Metric("rollmill_engine_kv_blocks_shared", "gauge", "Blocks held by several sequences at once.", "kv_shared/{policy}"),
    Metric("rollmill_engine_kv_evicted_total", "counter", "Cached prefixes given up for their memory.", "kv_evicted/{policy}"),
    Metric("rollmill_slots", "gauge", "Rollouts that this replica plays at once.", "slots"),
    Metric("rollmill_free_slots", "gauge", "Slots without a rollout.", "free_slots"),
    Metric("rollmill_rollouts_running", "gauge", "Rollouts played now, or waiting for a slot.", "running_rollouts"),
    Metric("rollmill_unacknowledged_records", "gauge", "Records that are not known to be durable yet.", "unacknowledged_records"),
    Metric("rollmill_trajectories_total", "counter", "Rollouts that ended in a trajectory.", "trajectories"),
    Metric("rollmill_failed_rollouts_total", "counter", "Rollouts that ended in a failure.", "failures"),
    Metric("rollmill_rollout_retries_total", "counter", "Rollouts played again after an infrastructure failure.", "retries"),
    Metric("rollmill_cancelled_rollouts_total", "counter", "Rollouts ended from outside.", "cancelled"),
    Metric("rollmill_record_streams_total", "counter", "Streams opened for trajectories; more than one when they broke.", "record_streams"),
    Metric("rollmill_records_acknowledged_total", "counter", "Acknowledgements by outcome.", "acknowledged/{outcome}"),
    Metric("rollmill_records_refused_here_total", "counter", "Records of this replica that the orchestrator did not take, by reason.", "refused/{reason}"),
    Metric("rollmill_engine_weight_version", "gauge", "The version in an engine.", "version_{policy}"),
    Metric("rollmill_weight_fetch_failures_total", "counter", "Versions that could not be taken at the first attempt.", "weights/{policy}/weights_failures"),
    Metric("rollmill_weight_transfer_bytes", "gauge", "Bytes of the newest version's transfer.", "weights/{policy}/weights_bytes"),
    Metric("rollmill_weight_transfer_bits_per_change", "gauge", "Bits per changed element of the newest transfer.", "weights/{policy}/weights_bits_per_change"),
    Metric("rollmill_weight_fetch_seconds", "gauge", "Seconds that fetching the newest version took.", "weights/{policy}/weights_fetch_s"),
    Metric("rollmill_weight_swap_pause_seconds", "gauge", "Seconds that decoding stood still for the newest version.", "weights/{policy}/swap_pause_s"),
    Metric("rollmill_mirror_weight_version", "gauge", "The version in the host mirror.", "weights/{policy}/weights_version"),
)  # fmt: skip


def gauges(player: RolloutPlayer, sender: TrajectorySender, policies: Mapping[str, LoadedPolicy]) -> dict[str, float]:
    """Values by name. A name with a slash belongs to one policy, or to one kind of answer to a record."""
    counters = player.counters
    found: dict[str, float] = {
        "slots": player.num_slots,
        "free_slots": player.num_free_slots,
        "running_rollouts": player.num_running,
        "unacknowledged_records": sender.num_unacknowledged,
        "trajectories": counters.trajectories,
        "failures": counters.failures,
        "retries": counters.retries,
        "cancelled": counters.cancelled,
        "record_streams": sender.num_streams,
    }
    for outcome, number in sender.outcomes.items():
        found[f"acknowledged/{outcome.removeprefix('RECORD_OUTCOME_').lower()}"] = number
    for reason, number in sender.refused.items():
        found[f"refused/{reason}"] = number
    for policy, loaded in policies.items():
        health = loaded.served.engine.health()
        found[f"tokens_generated/{policy}"] = health.generated_tokens
        found[f"requests_running/{policy}"] = health.running
        found[f"requests_waiting/{policy}"] = health.waiting
        found[f"version_{policy}"] = loaded.weights.held().number
        if health.kv is not None:
            found |= {f"kv_{name}/{policy}": float(value) for name, value in dataclasses.asdict(health.kv).items()}
        found |= {f"weights/{policy}/{name}": value for name, value in loaded.weights.gauges().items()}
    return found
