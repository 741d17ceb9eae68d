"""Weight versions: the ledger of each policy, and their announcements to the replicas with the peers that serve them.

``Announcer`` chooses the version to announce to each replica: the newest of a policy that the replica lacks, unless an
evaluation pins the current one. A replica that stays behind hears of the version again. ``FanOut`` plans the sources, so that
the publisher sends little more than one copy.

None of them decides about work. Independent of grpc and of the trainers' leases.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import islice

from services.common.errors import InvalidRequestError, VersionConflictError
from services.common.records import FetchPlan, RunCount, WeightVersion
from services.orchestrator.evaluation import Evaluations, Evaluators
from services.orchestrator.members import AnnounceVersion, Held, Replica, ReplicaPool

# --- Version ledger of one policy: its weight versions, their digests, and the addresses that serve them.


class VersionLedger:
    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.versions: dict[int, WeightVersion] = {}  # by number
        self.newest_number = -1  # before the first version
        self._offered_otherwise = -1  # the newest number that its trainer offered with another digest

    @property
    def offered_otherwise(self) -> bool:
        """Whether the trainer offered the newest version with another digest: it replayed a recorded batch to other bits, so
        a replica that does not hold the version cannot fetch it."""
        return self.newest_number >= 0 and self._offered_otherwise == self.newest_number

    @property
    def newest(self) -> WeightVersion | None:
        """None before the first version, and while the record of the newest version is lost."""
        return self.versions.get(self.newest_number)

    @property
    def lacks_newest(self) -> bool:
        """The newest version exists, but its record is lost: its trainer has to offer the version again."""
        return self.newest_number >= 0 and self.newest_number not in self.versions

    def check(self, version: WeightVersion) -> bool:
        """Whether this version may be recorded: True for a new version, False for a known one.

        Raises:
            VersionConflictError: the number has another digest.
            InvalidRequestError: the number leaves a gap.
        """
        known = self.versions.get(version.number)
        if known is not None:
            if known.digest != version.digest:
                self._offered_otherwise = max(self._offered_otherwise, version.number)
                raise VersionConflictError(
                    f"version {version.number} of {self.policy} has digest {known.digest}, not {version.digest}: "
                    "the trainer did not replay its recorded batches exactly; replicas that do not hold it wait for the next "
                    "version",
                    policy=self.policy,
                    version=str(version.number),
                )
            if self._offered_otherwise == version.number:
                self._offered_otherwise = -1  # a trainer serves it as recorded again
            return False
        if not 0 <= version.number <= self.newest_number + 1:
            raise InvalidRequestError(
                f"version {version.number} of {self.policy} cannot follow version {self.newest_number}",
                policy=self.policy,
            )
        return True

    def record(self, version: WeightVersion) -> bool:
        """Record a version, or refresh the addresses of a known one; True for a new version."""
        new = self.check(version)
        if new or version.sources:
            self.versions[version.number] = version
            self.newest_number = max(self.newest_number, version.number)
        return new

    def lose(self, number: int) -> None:
        """Versions up to this number exist, also those of which there is no record."""
        self.newest_number = max(self.newest_number, number)


AT_ONCE = 16  # replicas that are told of a version at one moment
NEXT, NEXT_S = 4, 0.01  # how many of the others follow at a time, and when: later where the event loop is busy
ANNOUNCE_AGAIN_S = 15.0  # interval of announcements to a replica that holds another version
MAX_RELAYS = 16  # replicas that pass parts of a version on to others
MAX_HOLDERS = 3  # named to a late receiver before the publisher


class FanOut:
    """Plans of the newest version of each policy, and the number of uses of each holder.

    Replicas that hold the same base fetch the same payload. Some of them are relays: relay i fetches shard i of the payload
    from the publisher, and every replica gets the other shards from the other relays. A late replica, or one with a failed
    transfer, fetches from replicas that hold the version, those with the fewest plans first.
    """

    def __init__(self) -> None:
        self.plans: defaultdict[str, dict[str, FetchPlan]] = defaultdict(dict)
        """Of each policy, by replica. A plan is told once: a second announcement means that the first one was lost."""
        self._named: Counter[str] = Counter()

    def published(self, policy: str, receivers: Iterable[Replica]) -> None:
        """Plan the transfers of a new version for replicas that hold another one. Plans of the previous version become
        void. A replica alone has no plan: a shard helps only when another replica wants the shard."""
        groups: defaultdict[Held, list[Replica]] = defaultdict(list)
        for receiver in receivers:
            groups[receiver.held[policy]].append(receiver)
        self.plans[policy] = {}
        for members in groups.values():
            relays = sorted({member.weights_address for member in members} - {""})[:MAX_RELAYS]
            if len(members) > 1 and relays:
                shard_of = {address: shard for shard, address in enumerate(relays)}
                for member in members:
                    plan = FetchPlan(relays=tuple(relays), own_shard=shard_of.get(member.weights_address))
                    self.plans[policy][member.replica_id] = plan

    def sources(self, version: WeightVersion, own_address: str, holders: Iterable[str]) -> tuple[str, ...]:
        """Sources for a late receiver: holders, those with the fewest uses first, then the publisher."""
        others = set(holders) - {"", own_address}
        chosen = heapq.nsmallest(MAX_HOLDERS, others, key=lambda h: (self._named[h], h))
        if chosen:
            self._named[chosen[0]] += 1  # the other sources are a fallback
        return (*chosen, *version.sources)


class Announcer:
    """Announces the versions of all policies to the replicas of a pool."""

    def __init__(
        self,
        pool: ReplicaPool,
        ledgers: Mapping[str, VersionLedger],
        evaluations: Evaluations,
        evaluators: Evaluators,
        counters: Counter[str],
        clock: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._ledgers = ledgers
        self._evaluations = evaluations
        self._evaluators = evaluators
        self._fanout = FanOut()
        self._counters = counters
        self._clock = clock
        self._to_sync: dict[str, bool] = {}  # replicas that are still to be told, in order; whether also again
        self._syncing = False

    def sync_all(self, *, again: bool = False) -> None:
        """Announce to every replica, relays first: at once to ``AT_ONCE`` of them, then to ``NEXT`` each ``NEXT_S``.

        An announced version makes a replica fetch, swap and report, which costs the event loop half a millisecond: a
        thousand at once would delay orders and records for half a second.
        """
        planned = [plan for plans in self._fanout.plans.values() for plan in plans.items()]
        relays = dict.fromkeys(name for name, plan in planned if plan.own_shard is not None)
        for name in {**relays, **self._pool.replicas}:
            self._to_sync[name] = again or self._to_sync.pop(name, False)
        if not self._syncing:
            self._sync_some(AT_ONCE)

    def _sync_some(self, count: int) -> None:
        for name in list(islice(self._to_sync, count)):
            again = self._to_sync.pop(name)
            if (replica := self._pool.replicas.get(name)) is not None:
                self.sync(replica, again=again)
        self._syncing = bool(self._to_sync)
        if self._syncing:
            asyncio.get_running_loop().call_later(NEXT_S, self._sync_some, NEXT)

    def sync(self, replica: Replica, *, again: bool = False) -> None:
        """Announce to a replica the newest missing version of each policy, unless an evaluation pins the current one."""
        now = self._clock()
        for policy, held in replica.held.items():
            ledger = self._ledgers.get(policy)
            newest = ledger.versions.get(ledger.newest_number) if ledger is not None else None
            if ledger is None or newest is None or (held.number == newest.number and held.digest == newest.digest):
                continue
            told, when = replica.announced.get(policy, (-1, 0.0))
            told_lately = now - when < ANNOUNCE_AGAIN_S
            if told == newest.number and told_lately and not again:
                continue
            if self._evaluations.passes:
                if self._evaluators.pinned_version(replica, policy) == held.number:
                    continue
                # A pending version would become active in the middle of the evaluation that waits for the replica.
                awaited = self._evaluators.awaited_version(replica, policy)
                is_on_its_way = policy in replica.moving and told_lately
                if awaited is not None and (is_on_its_way or held.number >= awaited):
                    continue
            known = ledger.versions.get(held.number)
            if held.number >= 0 and (known is None or known.digest != held.digest):
                self._counters[RunCount.WRONG_DIGEST_HELD.value] += 1
            plan = self._fanout.plans[policy].pop(replica.replica_id, None)
            if plan is None:
                current = Held(newest.number, newest.digest)
                holders = [r.weights_address for r in self._pool.workers() if r.held.get(policy) == current]
                newest = replace(newest, sources=self._fanout.sources(newest, replica.weights_address, holders))
            replica.announced[policy] = newest.number, now
            self._pool.send(replica, AnnounceVersion(newest, plan))

    def plan_fetches(self, policy: str) -> None:
        """Plan the transfers of a published version, ahead of its announcements."""
        receivers = [r for r in self._pool.workers() if policy in r.held]
        if self._evaluations.passes:
            receivers = [r for r in receivers if self._evaluators.pinned_version(r, policy) is None]
        self._fanout.published(policy, receivers)
