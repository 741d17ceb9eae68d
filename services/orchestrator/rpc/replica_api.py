"""Handles the calls of replicas: join, leave and reports. Independent of grpc.

Records of rollouts go to ``ingest`` instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping

import structlog

from services.common.records.fates import RunCount
from services.common.records.types import Interval, WeightVersion
from services.common.telemetry.accounts import AccountState, PeerState
from services.common.telemetry.log_events import LogEvent
from services.orchestrator.dispatch.dispatcher import Dispatcher
from services.orchestrator.members.absences import Absences
from services.orchestrator.members.commands import LeavePool
from services.orchestrator.members.device_turns import DeviceTurns
from services.orchestrator.members.pool import ReplicaPool
from services.orchestrator.members.replica import Held, Hello, Replica
from services.orchestrator.metrics import Timeline
from services.orchestrator.state.run_control import RunControl
from services.orchestrator.state.versions import VersionLedger

log = structlog.get_logger()


class ReplicaApi:
    def __init__(
        self,
        *,
        pool: ReplicaPool,
        dispatcher: Dispatcher,
        absences: Absences,
        turns: DeviceTurns,
        control: RunControl,
        ledgers: Mapping[str, VersionLedger],
        with_trainer: Collection[str],
        adopt_version: Callable[[WeightVersion], None],
        counters: Counter[str],
        timeline: Timeline,
    ) -> None:
        """``with_trainer``: policies whose versions a trainer publishes in this run; ``adopt_version`` records version 0
        of the others."""
        self._pool = pool
        self._dispatcher = dispatcher
        self._announcer = dispatcher.announcer
        self._absences = absences
        self._turns = turns
        self._control = control
        self._ledgers = ledgers
        self._with_trainer = with_trainer
        self._adopt_version = adopt_version
        self._counters = counters
        self._timeline = timeline

    def join(self, hello: Hello) -> Replica:
        """Add a replica to the pool, return its running work, and announce the versions that the replica should hold."""
        before = self._pool.get(hello.replica_id)
        if before is not None and before.incarnation != hello.incarnation:
            log.warning(
                LogEvent.REPLICA_REPLACED,
                replica=hello.replica_id,
                incarnation=before.incarnation,
                by=hello.incarnation,
            )
        replica = self._pool.join(hello)
        self._absences.replica_found(hello.replica_id)
        log.info(
            LogEvent.REPLICA_JOINED, replica=hello.replica_id, incarnation=hello.incarnation, slots=hello.num_slots
        )
        self._adopt_checkpoints(hello.held)
        self._dispatcher.adopt(replica, hello.running)
        self._dispatcher.rejoined(replica)
        self._turns.replica_joined(replica)
        if self._control.ended:
            self._pool.send(replica, LeavePool(f"the run has {self._control.phase.value}"))
        elif replica.draining:
            self._pool.send(replica, LeavePool("draining"))
        return replica

    def _adopt_checkpoints(self, held: Mapping[str, Held]) -> None:
        """Record version 0 of policies without a trainer (an untrained policy, a run that only evaluates): the first
        replica reports its loaded digest, and every other replica must hold the same."""
        for policy, found in held.items():
            if policy in self._with_trainer:
                continue
            if policy in self._ledgers and self._ledgers[policy].newest is None and found.number == 0:
                self._adopt_version(WeightVersion(policy=policy, number=0, digest=found.digest))

    def report(
        self,
        replica_id: str,
        incarnation: str,
        *,
        held: Mapping[str, Held],
        num_tokens: int,
        emission: Iterable[Interval],
        gauges: Mapping[str, float],
        running: Iterable[str] | None = None,
        accounts: tuple[AccountState, ...] = (),
        peers: tuple[PeerState, ...] = (),
        device_turn: int = 0,
    ) -> None:
        """Renew the lease; raises LeaseLostError for an ended lease or the lease of another incarnation."""
        before = self._pool.takers
        replica = self._pool.report(
            replica_id,
            incarnation,
            held=held,
            num_tokens=num_tokens,
            gauges=gauges,
            running=running,
            accounts=accounts,
            peers=peers,
            device_turn=device_turn,
        )
        self._turns.settle()
        self._counters[RunCount.TOKENS_SAMPLED.value] += replica.new_tokens
        self._timeline.emitted(replica_id, emission)
        self._announcer.sync(replica)
        if self._pool.takers != before:  # otherwise its availability is unchanged, as in most reports
            self._dispatcher.schedule()
