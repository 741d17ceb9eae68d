"""What replicas ask of the ring: a place in the pool, and to be heard while they work. Knows nothing about grpc.

Their records do not come this way: those go to ``ring.ingest``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import structlog

from services.common.accounts import AccountState, PeerState
from services.common.types import Interval, WeightVersion
from services.orchestrator.commands import LeavePool
from services.orchestrator.pool import Held, Hello, Replica
from services.orchestrator.ring import Ring

log = structlog.get_logger()


class ReplicaSide:
    def __init__(self, ring: Ring) -> None:
        self._ring = ring

    def join(self, hello: Hello) -> Replica:
        """Take a replica in, give it back what it is playing, and tell it what it should hold."""
        ring = self._ring
        replica = ring.pool.join(hello)
        ring.standing.lost.pop(f"replica/{hello.replica_id}", None)
        log.info("replica.joined", replica=hello.replica_id, incarnation=hello.incarnation, slots=hello.num_slots)
        self._adopt_checkpoints(hello.held)
        ring.dispatcher.adopt(replica, hello.running)
        ring.dispatcher.rejoined(replica)
        if ring.control.ended:
            ring.pool.send(replica, LeavePool(f"the run has {ring.control.phase.value}"))
        elif replica.draining:
            ring.pool.send(replica, LeavePool("draining"))
        return replica

    def _adopt_checkpoints(self, held: Mapping[str, Held]) -> None:
        """Without a trainer (an untrained policy, a run that only evaluates) nobody publishes version 0: the first replica
        says what it loaded, and every other must hold the same."""
        ring = self._ring
        for policy, found in held.items():
            if ring.num_steps and policy in ring.batches:
                continue
            if policy in ring.ledgers and ring.ledgers[policy].newest is None and found.number == 0:
                ring.adopt_version(WeightVersion(policy=policy, number=0, digest=found.digest))

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
    ) -> None:
        """Renew the lease; raises LeaseLostError when it has run out or belongs to another."""
        ring = self._ring
        replica = ring.pool.report(
            replica_id,
            incarnation,
            held=held,
            num_tokens=num_tokens,
            gauges=gauges,
            running=running,
            accounts=accounts,
            peers=peers,
        )
        ring.counters["tokens_sampled"] += replica.new_tokens
        ring.timeline.emitted(replica_id, emission)
        ring.dispatcher.announcer.sync(replica)
        ring.dispatcher.schedule()
