"""One replica: applies the pool's commands to the player and the weights, and builds the report."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterable, Mapping

import structlog

from services.common.errors import InfrastructureError
from services.common.records.device_turn import DeviceTurn
from services.common.records.types import FetchPlan, WeightVersion
from services.common.telemetry.accounts import AccountState, Activity, PeerState, TimeAccount
from services.common.telemetry.activities import ActivityName
from services.common.telemetry.components import ORCHESTRATOR, part, weights
from services.common.telemetry.log_events import LogEvent
from services.inference.device_turns import EngineTurns
from services.inference.loading import LoadedPolicy
from services.inference.metrics.emission import EmissionLog
from services.inference.rollouts.player import RolloutPlayer
from services.inference.rpc.gateway_client import GatewayClient
from services.inference.rpc.report_stream import ReplicaReport

log = structlog.get_logger(__name__)

_ENGINE_CHECK_S = 1.0


class Replica:
    """A ``PoolMember``: every command returns at once."""

    def __init__(
        self,
        *,
        policies: Mapping[str, LoadedPolicy],
        player: RolloutPlayer,
        gateway: GatewayClient,
        emissions: EmissionLog,
        account: TimeAccount,
        turns: EngineTurns | None = None,
        more_accounts: Iterable[TimeAccount] = (),
        gateway_state: Callable[[], PeerState | None] = lambda: None,
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

    # -- commands -----------------------------------------------------------------------------------------------

    def welcome(self, run_id: str, envgateway_address: str) -> None:
        self._gateway.connect(envgateway_address)

    def cancel_task_group(self, task_group_id: str, reason: str) -> None:
        ended = self._player.cancel(task_group_id)
        log.info(LogEvent.TASK_GROUP_CANCELLED, task_group=task_group_id, rollouts=ended, reason=reason)

    def new_version(self, version: WeightVersion, plan: FetchPlan | None) -> None:
        loaded = self._policies.get(version.policy)
        if loaded is None:
            log.debug("version.not_served", policy=version.policy, version=version.number)
            return
        loaded.weights.offer(version, plan)

    def drain(self, reason: str) -> None:
        log.info("replica.draining", reason=reason)
        self.drain_requested.set()

    def device_turn(self, turn: DeviceTurn) -> None:
        self._turns.offer(turn)

    # -- state --------------------------------------------------------------------------------------------------

    def held_versions(self) -> tuple[WeightVersion, ...]:
        return tuple(loaded.weights.held() for loaded in self._policies.values())

    def on_held(self, call: Callable[[], None]) -> None:
        """Call this whenever another version of a policy is held, or a device turn is carried out."""
        for loaded in self._policies.values():
            loaded.weights.on_held = call
        self._turns.on_done = call

    def device_turn_done(self) -> int:
        return self._turns.done.number

    def running_task_group_ids(self) -> tuple[str, ...]:
        return self._player.running_task_group_ids

    def report(self) -> ReplicaReport:
        health = [loaded.served.engine.health() for loaded in self._policies.values()]
        gauges: dict[str, float] = {}
        for loaded in self._policies.values():
            gauges |= loaded.weights.gauges()
        gauges["requests_running"] = float(sum(h.running for h in health))
        gauges["requests_waiting"] = float(sum(h.waiting for h in health))
        return ReplicaReport(
            held_versions=self.held_versions(),
            running_task_group_ids=self.running_task_group_ids(),
            num_generated_tokens=sum(h.generated_tokens for h in health),
            emission_intervals=tuple(self._emissions.take()),
            gauges=gauges,
            weight_transfers=tuple(t for loaded in self._policies.values() for t in loaded.weights.take_transfers()),
            accounts=self.accounts(),
            peers=tuple(peer for peer in (self._gateway_state(),) if peer is not None),
            device_turn=self.device_turn_done(),
        )

    def accounts(self) -> tuple[AccountState, ...]:
        """Time accounts of the slots, of each policy's weights, and of records in transit."""
        tokens = sum(loaded.served.engine.health().generated_tokens for loaded in self._policies.values())
        self._account.set_progress(tokens)
        self._account.rest(*self._why_idle())
        weights = (loaded.weights.account.state() for loaded in self._policies.values())
        return (
            self._account.state(),
            *(dataclasses.replace(w, component=part(self._account.component, w.component)) for w in weights),
            *(account.state() for account in self._more_accounts),
        )

    def _why_idle(self) -> Activity:
        """The activity of a slot without a rollout."""
        if self.drain_requested.is_set():
            return Activity(ActivityName.DRAINING)
        for name, loaded in self._policies.items():
            if loaded.weights.held().number < 0:
                return Activity(ActivityName.WAITING_FOR_FIRST_WEIGHTS, part(self._account.component, weights(name)))
        return Activity(ActivityName.WAITING_FOR_TASK_GROUPS, ORCHESTRATOR)

    async def watch_engines(self) -> None:
        """Raise ``InfrastructureError`` when an engine has died: the process must restart."""
        while True:
            await asyncio.sleep(_ENGINE_CHECK_S)
            for name, loaded in self._policies.items():
                health = loaded.served.engine.health()
                if not health.ok:
                    raise InfrastructureError(f"the engine of policy {name} died: {health.detail}")
