"""Which weight version each replica is told of, and where it fetches it.

A replica hears of the newest version of a policy that it does not hold, unless an evaluation keeps what it has in place;
one that stays behind hears of it again. Decides nothing about work.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping

from services.common.types import WeightVersion
from services.orchestrator.commands import AnnounceVersion
from services.orchestrator.evaluators import Evaluators
from services.orchestrator.fanout import FanOut, Receiver
from services.orchestrator.pool import Held, Replica, ReplicaPool
from services.orchestrator.versions import VersionLedger

ANNOUNCE_AGAIN_S = 15.0  # a replica that still holds something else is told again


class Announcer:
    def __init__(
        self,
        pool: ReplicaPool,
        ledgers: Mapping[str, VersionLedger],
        evaluators: Evaluators,
        fanout: FanOut,
        counters: Counter[str],
        clock: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._ledgers = ledgers
        self._evaluators = evaluators
        self._fanout = fanout
        self._counters = counters
        self._clock = clock

    def sync(self, replica: Replica, *, again: bool = False) -> None:
        """Tell a replica the newest version of each policy that it does not hold, unless an evaluation pins it."""
        now = self._clock()
        for policy, held in replica.held.items():
            newest = self._ledgers[policy].newest if policy in self._ledgers else None
            if newest is None or (held.number == newest.number and held.digest == newest.digest):
                continue
            told, when = replica.announced.get(policy, (-1, 0.0))
            told_lately = now - when < ANNOUNCE_AGAIN_S
            if told == newest.number and told_lately and not again:
                continue
            if self._is_kept(replica, policy, held, told_lately):
                continue
            if not self._ledgers[policy].knows(held.number, held.digest) and held.number >= 0:
                self._counters["wrong_digest_held"] += 1
            replica.announced[policy] = (newest.number, now)
            self._pool.send(replica, self._announcement(replica, newest))

    def _is_kept(self, replica: Replica, policy: str, held: Held, told_lately: bool) -> bool:
        """Whether an evaluation wants the replica to stay at what it holds, or at what it was told of."""
        if self._evaluators.pinned_version(replica, policy) == held.number:
            return True
        # With another version on its way it would move on in the middle of the evaluation that it is awaited for.
        awaited = self._evaluators.awaited_version(replica, policy)
        is_on_its_way = replica.is_moving(policy) and told_lately
        return awaited is not None and (is_on_its_way or held.number >= awaited)

    def plan_fetches(self, policy: str) -> None:
        """A version of a policy was published: decide who fetches it from whom, before anybody is told."""
        receivers = [
            Receiver(replica_id=r.replica_id, address=r.weights_address, base=(held.number, held.digest))
            for r in self._pool
            if r.takes_work
            and (held := r.held.get(policy)) is not None
            and self._evaluators.pinned_version(r, policy) is None
        ]
        self._fanout.published(policy, receivers)

    def _announcement(self, replica: Replica, newest: WeightVersion) -> AnnounceVersion:
        plan = self._fanout.take_plan(newest.policy, replica.replica_id)
        if plan is not None:
            return AnnounceVersion(newest, plan)
        current = Held(newest.number, newest.digest)
        holders = [r.weights_address for r in self._pool if r.takes_work and r.held.get(newest.policy) == current]
        sources = self._fanout.sources(newest, replica.weights_address, holders)
        return AnnounceVersion(dataclasses.replace(newest, sources=sources))
