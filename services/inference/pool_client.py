"""Membership in the orchestrator's pool: the stream of commands and the report that renews the lease.

    join loop:    JoinPool -> command -> replica ...   broken: again after a pause, same incarnation
    report loop:  ReportReplica <- replica, every 2 s and after each swap   LEASE_LOST: the join loop joins again

A broken stream changes nothing for what is being played: the orchestrator keeps it assigned within the lease, and
after that the first durable record of a slot wins. This file converts; what a command means is ``replica.py``'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import grpc
import structlog

from services.common.accounts import AccountState, PeerState
from services.common.aio import backoff
from services.common.errors import AccessError, DeadlineError, LeaseLostError, MillraceError, UserError
from services.common.pb import pool_pb2, pool_pb2_grpc
from services.common.rpc.channel import DEADLINES, translated_errors
from services.common.rpc.refusals import refusal_behind
from services.common.rpc.streams import call_cancellation_is_an_error
from services.common.serde import fetch_plan_from_proto, interval_to_proto, order_from_proto, weight_version_from_proto
from services.common.serde_accounts import account_to_proto, peer_to_proto
from services.common.serde_transfers import weight_transfer_to_proto
from services.common.types import FetchPlan, TaskGroupOrder, WeightTransfer, WeightVersion

log = structlog.get_logger(__name__)

REPORT_PERIOD_S = 2.0
_LOOK_S = 0.05  # how soon a new version is noticed
AWAY_TIMEOUT_S = 600.0  # an orchestrator that is away for longer does not come back: end, and let a supervisor decide
_TAKEOVERS = 3  # within _TAKEOVER_WINDOW_S: another process goes on claiming this replica id
_TAKEOVER_WINDOW_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaIdentity:
    """Who joins. ``incarnation`` is new for every start of the process."""

    replica_id: str
    incarnation: str
    num_slots: int
    labels: Mapping[str, str] = field(default_factory=dict)
    weights_address: str = ""  # where it relays weights; empty: nowhere


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """What a replica holds and does."""

    num_free_slots: int
    held_versions: tuple[WeightVersion, ...]
    running_task_group_ids: tuple[str, ...]
    num_generated_tokens: int
    emission_intervals: tuple[tuple[float, float], ...]  # since the last report
    gauges: Mapping[str, float]
    weight_transfers: tuple[WeightTransfer, ...] = ()  # since the last report
    accounts: tuple[AccountState, ...] = ()
    peers: tuple[PeerState, ...] = ()


class PoolMember(Protocol):
    """What the commands of the pool are about; each method returns at once."""

    def welcome(self, run_id: str, envgateway_address: str) -> None: ...
    def run_task_group(self, order: TaskGroupOrder) -> None: ...
    def refuse_task_group(self, task_group_id: str, indices: tuple[int, ...], error: MillraceError) -> None: ...
    def cancel_task_group(self, task_group_id: str, reason: str) -> None: ...
    def new_version(self, version: WeightVersion, plan: FetchPlan | None) -> None: ...
    def drain(self, reason: str) -> None: ...
    def held_versions(self) -> tuple[WeightVersion, ...]: ...
    def running_task_group_ids(self) -> tuple[str, ...]: ...
    def report(self) -> ReplicaReport: ...


class PoolClient:
    """``run`` ends when the member has been drained and ``leave`` was called; it raises when membership is refused."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        identity: ReplicaIdentity,
        member: PoolMember,
        *,
        report_period_s: float = REPORT_PERIOD_S,
        away_timeout_s: float = AWAY_TIMEOUT_S,
    ) -> None:
        self._channel = channel
        self._stub: pool_pb2_grpc.PoolServiceAsyncStub = pool_pb2_grpc.PoolServiceStub(channel)
        self._identity = identity
        self._member = member
        self._report_period_s = report_period_s
        self._away_timeout_s = away_timeout_s
        self._call: grpc.aio.UnaryStreamCall[pool_pb2.JoinPoolRequest, pool_pb2.JoinPoolResponse] | None = None
        self._welcomed = asyncio.Event()
        self._left = asyncio.Event()
        self._draining = False
        self._heard_at = time.monotonic()
        self._unreported: list[tuple[float, float]] = []  # stretches whose report did not arrive
        self._transfers: list[WeightTransfer] = []  # the same of weight transfers
        self._told: tuple[WeightVersion, ...] = ()  # what the last report said is held
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

    def leave(self) -> None:
        """Send a last report and end ``run``."""
        self._left.set()
        if self._call is not None:
            self._call.cancel()

    # -- commands in --------------------------------------------------------------------------------------------

    async def _join_loop(self) -> None:
        delays = backoff()
        while not self._left.is_set():
            self._welcomed.clear()
            try:
                await self._one_stream()
                if self._draining:
                    await self._left.wait()  # reports go on; whoever plays the last rollouts calls leave
                    return
                log.info("pool.stream_ended")
            except LeaseLostError as error:
                self._lease_lost(error)
            except UserError:
                raise  # refused for what we are: joining again would be refused again
            except MillraceError as error:
                if not self._left.is_set():
                    log.warning("pool.stream_broke", error=error.message)
                    if (refused := await refusal_behind(error, self._channel)) is not None:
                        raise refused from None
            if self._welcomed.is_set():
                delays = backoff()
            self._check_away()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(next(delays)):
                    await self._left.wait()

    async def _one_stream(self) -> None:
        identity = self._identity
        request = pool_pb2.JoinPoolRequest(
            replica_id=identity.replica_id,
            incarnation=identity.incarnation,
            held_versions=[_held_to_proto(v) for v in self._member.held_versions()],
            num_slots=identity.num_slots,
            running_task_group_ids=self._member.running_task_group_ids(),
            labels=identity.labels,
            weights_address=identity.weights_address,
        )
        call = self._call = self._stub.JoinPool(request)
        try:
            with translated_errors("orchestrator"), call_cancellation_is_an_error("JoinPool"):
                async for response in call:
                    self._heard_at = time.monotonic()
                    self._obey(response)
        finally:
            self._call = None
            call.cancel()

    def _obey(self, response: pool_pb2.JoinPoolResponse) -> None:
        command = response.WhichOneof("command")
        member = self._member
        if command == "welcome":
            log.info("pool.joined", replica=self._identity.replica_id, run=response.welcome.run_id)
            member.welcome(response.welcome.run_id, response.welcome.envgateway_address)
            self._welcomed.set()
        elif command == "run_task_group":
            self._order(response.run_task_group)
        elif command == "cancel_task_group":
            member.cancel_task_group(response.cancel_task_group.task_group_id, response.cancel_task_group.reason)
        elif command == "new_version":
            announced = response.new_version
            plan = fetch_plan_from_proto(announced.plan) if announced.HasField("plan") else None
            member.new_version(weight_version_from_proto(announced.version), plan)
        elif command == "drain":
            self._draining = True
            member.drain(response.drain.reason)
        else:
            log.warning("pool.unknown_command")  # a newer orchestrator: what we do not know we leave alone

    def _order(self, proto: pool_pb2.RunTaskGroup) -> None:
        try:
            order = order_from_proto(proto)
        except MillraceError as error:  # this order's mistake: its slots fail, membership and the others go on
            log.error("pool.unreadable_order", task_group=proto.task_group_id, error=error.message)
            self._member.refuse_task_group(proto.task_group_id, tuple(proto.indices), error)
        else:
            self._member.run_task_group(order)

    def _lease_lost(self, error: LeaseLostError) -> None:
        """Told apart: a lease that ran out, however often a bad link does that, and one that another process took."""
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

    def _check_away(self) -> None:
        away_s = time.monotonic() - self._heard_at
        if away_s > self._away_timeout_s:
            raise DeadlineError(
                f"the orchestrator has been away for {away_s:.0f} s (limit {self._away_timeout_s:.0f} s)"
            )

    # -- reports out --------------------------------------------------------------------------------------------

    async def _report_loop(self) -> None:
        answered = True
        while not self._left.is_set():
            if self._welcomed.is_set() or self._draining:
                answered = await self._report(warn=answered)
            await self._until_due()
        await self._report(warn=False)

    async def _until_due(self) -> None:
        """Wait for the period, or for something that cannot wait: the welcome, a new version, the end.

        The orchestrator gives no work to a replica whose reported version is too old, so a swap is told at once.
        """
        joined = self._welcomed.is_set()
        due = time.monotonic() + self._report_period_s
        while time.monotonic() < due:
            if self._member.held_versions() != self._told if joined else self._welcomed.is_set():
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(_LOOK_S, self._report_period_s)):
                    await self._left.wait()
                    return

    async def _report(self, *, warn: bool) -> bool:
        report = self._member.report()
        self._unreported += report.emission_intervals
        self._transfers += report.weight_transfers
        self._told = report.held_versions
        request = pool_pb2.ReportReplicaRequest(
            replica_id=self._identity.replica_id,
            incarnation=self._identity.incarnation,
            num_free_slots=report.num_free_slots,
            held_versions=[_held_to_proto(v) for v in report.held_versions],
            running_task_group_ids=report.running_task_group_ids,
            num_generated_tokens=report.num_generated_tokens,
            emission_intervals=[interval_to_proto(interval) for interval in self._unreported],
            gauges=report.gauges,
            weight_transfers=[weight_transfer_to_proto(transfer) for transfer in self._transfers],
            accounts=[account_to_proto(account) for account in report.accounts],
            peers=[peer_to_proto(peer) for peer in report.peers],
        )
        try:
            with translated_errors("orchestrator"):
                await self._stub.ReportReplica(request, timeout=DEADLINES["ReportReplica"])
        except LeaseLostError:
            if self._call is not None and not self._draining:
                self._call.cancel()  # the join loop joins again
            return True
        except AccessError:
            raise  # refused for what we are, or no longer are
        except MillraceError as error:
            if warn:
                log.warning("pool.report_failed", error=error.message)
            return False
        self._heard_at = time.monotonic()
        self._unreported.clear()
        self._transfers.clear()
        return True


def _held_to_proto(version: WeightVersion) -> pool_pb2.HeldVersion:
    return pool_pb2.HeldVersion(policy=version.policy, number=version.number, digest=version.digest)
