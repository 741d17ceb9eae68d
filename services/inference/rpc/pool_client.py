"""Membership in the orchestrator's pool: the stream of commands and the report that renews the lease.

    join loop:    JoinPool -> command -> replica ...   broken: again after a pause, same incarnation
    report loop:  StreamReports <- replica, every 2 s or at the orchestrator's interval, and after each swap;
                  LEASE_LOST: the join loop joins again

A broken stream does not affect running rollouts: the orchestrator keeps them assigned within the lease, and after that
the first durable record of a slot wins. This file converts messages; ``replica.py`` applies the commands.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Protocol

import grpc
import structlog

from services.common.aio import backoff
from services.common.errors import AccessError, DeadlineError, LeaseLostError, RollmillError, UserError
from services.common.pb import pool_pb2, pool_pb2_grpc
from services.common.records.device_turn import (
    DeviceTurn,
)
from services.common.records.types import (
    FetchPlan,
    TaskGroupOrder,
    WeightTransfer,
    WeightVersion,
    by_name,
)
from services.common.rpc.client.channel import translated_errors
from services.common.rpc.client.refusals import refusal_behind
from services.common.rpc.client.run_client import AWAY_S
from services.common.wire import duration_from_proto, read, write
from services.inference.rollouts.player import RolloutPlayer
from services.inference.rpc.report_stream import (
    ReplicaIdentity,
    ReplicaReport,
    ReportStream,
    report_to_proto,
)

log = structlog.get_logger(__name__)

REPORT_PERIOD_S = 2.0
MOST_PERIOD_S = 10.0  # that the orchestrator may ask for: a lease is 30 s
_TAKEOVERS = 3  # within _TAKEOVER_WINDOW_S: another process claims this replica id
_TAKEOVER_WINDOW_S = 60.0


class PoolMember(Protocol):
    """Receiver of the pool's commands other than orders; each method returns at once."""

    def welcome(self, run_id: str, envgateway_address: str) -> None: ...
    def cancel_task_group(self, task_group_id: str, reason: str) -> None: ...
    def new_version(self, version: WeightVersion, plan: FetchPlan | None) -> None: ...
    def drain(self, reason: str) -> None: ...
    def device_turn(self, turn: DeviceTurn) -> None: ...
    def device_turn_done(self) -> int: ...
    def held_versions(self) -> tuple[WeightVersion, ...]: ...
    def on_held(self, call: Callable[[], None]) -> None: ...
    def running_task_group_ids(self) -> tuple[str, ...]: ...
    def report(self) -> ReplicaReport: ...


class PoolClient:
    """Gives the pool's orders to the player, and its other commands to the member. ``run`` ends when the member has been
    drained and ``leave`` was called; raises when membership is refused."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        identity: ReplicaIdentity,
        member: PoolMember,
        player: RolloutPlayer,
        *,
        report_period_s: float = REPORT_PERIOD_S,
        away_timeout_s: float = AWAY_S,
    ) -> None:
        self._channel = channel
        self._stub: pool_pb2_grpc.PoolServiceAsyncStub = pool_pb2_grpc.PoolServiceStub(channel)
        self._identity = identity
        self._member = member
        self._player = player
        self._least_period_s = report_period_s
        self.report_period_s = report_period_s  # set by the orchestrator
        self._away_timeout_s = away_timeout_s
        self._reports = ReportStream(self._stub)
        self._call: grpc.aio.UnaryStreamCall[pool_pb2.JoinPoolRequest, pool_pb2.JoinPoolResponse] | None = None
        self._welcomed = asyncio.Event()
        self._left = asyncio.Event()
        self._woken = asyncio.Event()  # a report may be urgent
        member.on_held(self._woken.set)
        self._draining = False
        self._last_answer_at = time.monotonic()
        self._unreported: list[tuple[float, float]] = []  # intervals whose report did not arrive
        self._transfers: list[WeightTransfer] = []  # the same of weight transfers
        self._reported_versions: tuple[WeightVersion, ...] = ()  # versions that the last report named
        self._reported_turn = 0  # the same of the device turn
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
            self._reports.close()

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
                if self._draining:
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
                    if (refused := await refusal_behind(error, self._channel)) is not None:
                        raise refused from None
            if self._welcomed.is_set():
                delays = backoff()
            self._check_away()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(next(delays)):
                    await self._left.wait()

    async def _one_stream(self) -> None:
        request = pool_pb2.JoinPoolRequest(
            **by_name(self._identity),
            held_versions=[write(v, pool_pb2.HeldVersion()) for v in self._member.held_versions()],
            running_task_group_ids=self._member.running_task_group_ids(),
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
        member = self._member
        if command == "welcome":
            log.info("pool.joined", replica=self._identity.replica_id, run=response.welcome.run_id)
            member.welcome(response.welcome.run_id, response.welcome.envgateway_address)
            self._welcomed.set()
            self._woken.set()
        elif command == "run_task_group":
            self._order(response.run_task_group)
        elif command == "cancel_task_group":
            member.cancel_task_group(response.cancel_task_group.task_group_id, response.cancel_task_group.reason)
        elif command == "new_version":
            announced = response.new_version
            plan = read(FetchPlan, announced.plan) if announced.HasField("plan") else None
            member.new_version(read(WeightVersion, announced.version), plan)
        elif command == "device_turn":
            member.device_turn(read(DeviceTurn, response.device_turn))
        elif command == "drain":
            self._draining = True
            member.drain(response.drain.reason)
        else:
            log.warning("pool.unknown_command")  # a newer orchestrator: unknown commands are ignored

    def _order(self, proto: pool_pb2.RunTaskGroup) -> None:
        try:
            order = read(TaskGroupOrder, proto)
        except RollmillError as error:  # a faulty order: its slots fail, membership and other orders go on
            log.error("pool.unreadable_order", task_group=proto.task_group_id, error=error.message)
            self._player.refuse(proto.task_group_id, tuple(proto.indices), error)
        else:
            self._player.play(order)

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

    def _check_away(self) -> None:
        away_s = time.monotonic() - self._last_answer_at
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
        """Wait for the report period, or until a report is urgent: after the welcome, a new version, or at the end.

        The orchestrator gives no work to a replica whose reported version is too old, so a swap is reported at once.
        """
        joined = self._welcomed.is_set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.report_period_s):
                while not (self._left.is_set() or self._is_urgent(joined)):
                    self._woken.clear()
                    await self._woken.wait()

    def _is_urgent(self, joined: bool) -> bool:
        """``joined``: whether the last report came after the welcome."""
        if joined:
            reported = (self._reported_versions, self._reported_turn)
            return (self._member.held_versions(), self._member.device_turn_done()) != reported
        return self._welcomed.is_set()

    async def _report(self, *, warn: bool) -> bool:
        report = self._member.report()
        self._unreported += report.emission_intervals
        self._transfers += report.weight_transfers
        self._reported_versions, self._reported_turn = report.held_versions, report.device_turn
        request = report_to_proto(self._identity, report, self._unreported, self._transfers)
        try:
            answer = await self._reports.send(request)
        except LeaseLostError:
            if self._call is not None and not self._draining:
                self._call.cancel()  # the join loop joins again
            return True
        except AccessError:
            raise  # this replica is refused, or is no longer a member
        except RollmillError as error:
            if warn:
                log.warning("pool.report_failed", error=error.message)
            return False
        self._last_answer_at = time.monotonic()
        asked_s = min(duration_from_proto(answer.next_report), MOST_PERIOD_S)
        self.report_period_s = max(self._least_period_s, asked_s)
        self._unreported.clear()
        self._transfers.clear()
        return True
