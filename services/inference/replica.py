"""One replica: what the commands of the pool do, and what it reports. Parts meet here and do not know each other."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import structlog

from services.common.errors import InfrastructureError, MillraceError
from services.common.types import FetchPlan, TaskGroupOrder, WeightVersion
from services.inference.emission import EmissionLog
from services.inference.gateway_client import GatewayClient
from services.inference.gauges import WaitShares
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
        waits: WaitShares,
    ) -> None:
        self._policies = policies
        self._player = player
        self._gateway = gateway
        self._emissions = emissions
        self._waits = waits
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
        gauges = self._waits.take()
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
        )

    async def watch_engines(self) -> None:
        """Raise ``InfrastructureError`` when an engine has died: only a new process helps."""
        while True:
            await asyncio.sleep(_ENGINE_CHECK_S)
            for name, loaded in self._policies.items():
                health = loaded.served.engine.health()
                if not health.ok:
                    raise InfrastructureError(f"the engine of policy {name} died: {health.detail}")
