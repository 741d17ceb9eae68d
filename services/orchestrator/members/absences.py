"""Ends the leases of silent members, and notes which components are lost until they return."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import structlog

from services.common.records.fates import RunCount
from services.common.telemetry.components import Component
from services.common.telemetry.components import replica as replica_component
from services.common.telemetry.components import trainer as trainer_component
from services.common.telemetry.log_events import LogEvent
from services.orchestrator.members.pool import ReplicaPool
from services.orchestrator.members.trainers import TrainerLeases

log = structlog.get_logger()


class Absences:
    def __init__(
        self,
        pool: ReplicaPool,
        trainers: TrainerLeases,
        *,
        lost: dict[Component, float],
        untrained: set[str],
        counters: Counter[str],
        clock: Callable[[], float],
        on_lost: Callable[[], None],
        on_checked: Callable[[], None] = lambda: None,
    ) -> None:
        """``lost`` and ``untrained`` are kept up to date: lost components with their time, and policies whose trainer
        is lost. ``on_lost`` is called after every loss, ``on_checked`` after every check."""
        self._pool = pool
        self._trainers = trainers
        self._lost = lost
        self._untrained = untrained
        self._counters = counters
        self._clock = clock
        self._on_lost = on_lost
        self._on_checked = on_checked

    def check(self) -> None:
        """Give away the work of silent replicas, and end the leases that ran out. The other policies continue after the
        loss of a trainer."""
        for replica in self._pool.give_away():
            log.warning("replica.work_given_away", replica=replica.replica_id, incarnation=replica.incarnation)
        for replica in self._pool.expire():
            log.warning(LogEvent.LEASE_LOST, replica=replica.replica_id, incarnation=replica.incarnation)
            self._counters[RunCount.REPLICA_LEASES_LOST.value] += 1
            self._lost[replica_component(replica.replica_id)] = self._clock()
            self._on_lost()
        for trainer in self._trainers.expire():
            log.warning("trainer.lease_lost", policy=trainer.policy, incarnation=trainer.incarnation)
            self._counters[RunCount.TRAINER_LEASES_LOST.value] += 1
            self._lost[trainer_component(trainer.policy)] = self._clock()
            self._untrained.add(trainer.policy)
            self._on_lost()
        self._on_checked()

    def prolong(self, seconds: float) -> None:
        """Extend all leases by a time during which this process did not run."""
        self._pool.prolong(seconds)
        self._trainers.prolong(seconds)

    def replica_found(self, replica_id: str) -> None:
        """Forget the loss of a replica that has joined again."""
        self._lost.pop(replica_component(replica_id), None)

    def trainer_found(self, policy: str) -> None:
        """Forget the absence of a policy's trainer."""
        self._lost.pop(trainer_component(policy), None)
        self._untrained.discard(policy)
