"""One replica: what the commands of the pool do, and what it reports. Parts meet here and do not know each other."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterable, Mapping

import structlog

from services.common.accounts import AccountState, PeerState, TimeAccount
from services.common.errors import InfrastructureError, MillraceError
from services.common.types import FetchPlan, TaskGroupOrder, WeightVersion
from services.inference.emission import EmissionLog
from services.inference.gateway_client import GatewayClient
from services.inference.loading import LoadedPolicy
from services.inference.pool_client import ReplicaReport
from services.inference.rollout import RolloutPlayer

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
        more_accounts: Iterable[TimeAccount] = (),
        gateway_state: Callable[[], PeerState | None] = lambda: None,
    ) -> None:
        """``account`` is that of the slots; ``more_accounts`` are reported beside it and those of the weights."""
        self._policies = policies
        self._player = player
        self._gateway = gateway
        self._emissions = emissions
        self._account = account
        self._more_accounts = tuple(more_accounts)
        self._gateway_state = gateway_state
        self.drain_requested = asyncio.Event()

    # -- commands -----------------------------------------------------------------------------------------------

    def welcome(self, run_id: str, envgateway_address: str) -> None:
        self._gateway.connect(envgateway_address)

    def run_task_group(self, order: TaskGroupOrder) -> None:
        self._player.play(order)

    def refuse_task_group(self, task_group_id: str, indices: tuple[int, ...], error: MillraceError) -> None:
        self._player.refuse(task_group_id, indices, error)

    def cancel_task_group(self, task_group_id: str, reason: str) -> None:
        ended = self._player.cancel(task_group_id)
        log.info("task_group.cancelled", task_group=task_group_id, rollouts=ended, reason=reason)

    def new_version(self, version: WeightVersion, plan: FetchPlan | None) -> None:
        loaded = self._policies.get(version.policy)
        if loaded is None:
            log.debug("version.not_served", policy=version.policy, version=version.number)
            return
        loaded.weights.offer(version, plan)

    def drain(self, reason: str) -> None:
        log.info("replica.draining", reason=reason)
        self.drain_requested.set()

    # -- state --------------------------------------------------------------------------------------------------

    def held_versions(self) -> tuple[WeightVersion, ...]:
        return tuple(loaded.weights.held() for loaded in self._policies.values())

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
            num_free_slots=0 if self.drain_requested.is_set() else self._player.num_free_slots,
            held_versions=self.held_versions(),
            running_task_group_ids=self.running_task_group_ids(),
            num_generated_tokens=sum(h.generated_tokens for h in health),
            emission_intervals=tuple(self._emissions.take()),
            gauges=gauges,
            weight_transfers=tuple(t for loaded in self._policies.values() for t in loaded.weights.take_transfers()),
            accounts=self.accounts(),
            peers=tuple(peer for peer in (self._gateway_state(),) if peer is not None),
        )

    def accounts(self) -> tuple[AccountState, ...]:
        """Where the time of the slots goes, of the weights of each policy, and of the records on their way."""
        tokens = sum(loaded.served.engine.health().generated_tokens for loaded in self._policies.values())
        self._account.set_progress(tokens)
        self._account.rest(*self._why_idle())
        weights = (loaded.weights.account.state() for loaded in self._policies.values())
        return (
            self._account.state(),
            *(dataclasses.replace(w, component=f"{self._account.component}/{w.component}") for w in weights),
            *(account.state() for account in self._more_accounts),
        )

    def _why_idle(self) -> tuple[str, str]:
        """What a slot without a rollout waits for, and at whom."""
        if self.drain_requested.is_set():
            return "draining", ""
        for name, loaded in self._policies.items():
            if loaded.weights.held().number < 0:
                return "waiting for the first weights", f"{self._account.component}/weights/{name}"
        return "waiting for task groups", "orchestrator"

    async def watch_engines(self) -> None:
        """Raise ``InfrastructureError`` when an engine has died: only a new process helps."""
        while True:
            await asyncio.sleep(_ENGINE_CHECK_S)
            for name, loaded in self._policies.items():
                health = loaded.served.engine.health()
                if not health.ok:
                    raise InfrastructureError(f"the engine of policy {name} died: {health.detail}")
