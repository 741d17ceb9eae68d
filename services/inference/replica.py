"""One replica: what the commands of the pool do, and what it reports. Parts meet here and do not know each other."""

from __future__ import annotations

from collections.abc import Mapping

import structlog

from services.common.types import TaskGroupOrder, WeightVersion
from services.inference.emission import EmissionLog
from services.inference.engine.base import Engine
from services.inference.gateway_client import GatewayClient
from services.inference.gauges import WaitShares
from services.inference.pool_client import ReplicaReport
from services.inference.rollout import RolloutPlayer
from services.inference.weight_updater import WeightUpdater

log = structlog.get_logger()


class Replica:
    """A ``PoolMember``: every method returns at once."""

    def __init__(
        self,
        *,
        player: RolloutPlayer,
        updaters: Mapping[str, WeightUpdater],
        engines: Mapping[str, Engine],
        gateway: GatewayClient,
        emissions: EmissionLog,
        waits: WaitShares,
    ) -> None:
        self._player = player
        self._updaters = updaters
        self._engines = engines
        self._gateway = gateway
        self._emissions = emissions
        self._waits = waits
        self.run_id = ""
        self.draining = False

    def welcome(self, run_id: str, envgateway_address: str) -> None:
        self.run_id = run_id
        self._gateway.connect(envgateway_address)

    def run_task_group(self, order: TaskGroupOrder) -> None:
        self._player.play(order)

    def cancel_task_group(self, task_group_id: str, reason: str) -> None:
        ended = self._player.cancel(task_group_id)
        log.info("task_group.cancelled", task_group=task_group_id, rollouts=ended, reason=reason)

    def new_version(self, version: WeightVersion) -> None:
        updater = self._updaters.get(version.policy)
        if updater is None:
            log.debug("version.not_served", policy=version.policy, version=version.number)
            return
        updater.offer(version)

    def drain(self, reason: str) -> None:
        log.info("replica.draining", reason=reason)
        self.draining = True

    def held_versions(self) -> tuple[WeightVersion, ...]:
        return tuple(updater.held() for updater in self._updaters.values())

    def running_task_group_ids(self) -> tuple[str, ...]:
        return self._player.running_task_group_ids

    def report(self) -> ReplicaReport:
        health = {name: engine.health() for name, engine in self._engines.items()}
        gauges = self._waits.take()
        for updater in self._updaters.values():
            gauges |= updater.gauges()
        gauges["requests_running"] = float(sum(h.running for h in health.values()))
        gauges["requests_waiting"] = float(sum(h.waiting for h in health.values()))
        return ReplicaReport(
            num_free_slots=0 if self.draining else self._player.num_free_slots,
            held_versions=self.held_versions(),
            running_task_group_ids=self.running_task_group_ids(),
            num_generated_tokens=sum(h.generated_tokens for h in health.values()),
            emission_intervals=tuple(self._emissions.take()),
            gauges=gauges,
        )
