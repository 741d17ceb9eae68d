"""The counters equal a full scan of the replicas, after any history; orphans are issued in order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.common.records import WeightVersion
from services.orchestrator.groups import OrphanedGroups, TaskGroup
from services.orchestrator.members import REJOIN_S, AnnounceVersion, CancelGroup, Held, Hello, Replica, ReplicaPool
from tests.unit.orchestrator.builders import failure, order

NAMES = ("a", "b", "c", "d", "e")
LEASE_S = 30.0

holdings = st.fixed_dictionaries(
    {"p": st.builds(Held, st.integers(-1, 2), st.sampled_from(["d", "other"]))},
    optional={"q": st.builds(Held, st.integers(0, 1), st.just("d"))},
)


class PoolHistory(RuleBasedStateMachine):
    """Replicas come, go, report and play; every choice is compared with one made by looking at each of them."""

    @initialize()
    def begin(self) -> None:
        self.now = 0.0
        self.orphans: set[str] = set()
        self.pool = ReplicaPool(LEASE_S, lambda: self.now)
        self.pool.on_orphaned = self.orphans.update
        self.num_groups = 0

    def replica(self, data: st.DataObject) -> Replica:
        return data.draw(st.sampled_from(sorted(self.pool, key=lambda r: r.replica_id)))

    # --- events ------------------------------------------------------------------------------------------------------

    @rule(name=st.sampled_from(NAMES), life=st.integers(1, 2), num_slots=st.integers(1, 9), held=holdings)
    def join(self, name: str, life: int, num_slots: int, held: Mapping[str, Held]) -> None:
        self.pool.join(Hello(replica_id=name, incarnation=str(life), num_slots=num_slots, held=held))

    @precondition(lambda self: len(self.pool))
    @rule(data=st.data(), held=holdings)
    def report(self, data: st.DataObject, held: Mapping[str, Held]) -> None:
        replica = self.replica(data)
        said = data.draw(st.none() | st.lists(st.sampled_from([*replica.assignments, "unknown"]), max_size=3))
        self.pool.report(*replica.key, held=held, num_tokens=0, gauges={}, running=said)

    @precondition(lambda self: len(self.pool))
    @rule(data=st.data(), number=st.integers(0, 3), policy=st.sampled_from(["p", "q"]))
    def tell(self, data: st.DataObject, number: int, policy: str) -> None:
        version = WeightVersion(policy=policy, number=number, digest="d")
        self.pool.tell(self.replica(data), AnnounceVersion(version))

    @precondition(lambda self: len(self.pool))
    @rule(data=st.data(), what=st.sampled_from(["break", "drain", "overflow"]))
    def lose(self, data: st.DataObject, what: str) -> None:
        replica = self.replica(data)
        if what == "drain":
            self.pool.drain_all("test")
        elif what == "overflow":
            while self.pool.send(replica, CancelGroup("g", "fill")):
                pass
        elif replica.mailbox is not None:
            self.pool.stream_ended(replica, replica.mailbox)

    @rule(seconds=st.sampled_from([1.0, REJOIN_S, LEASE_S]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.pool.give_away()
        self.pool.expire()

    @precondition(lambda self: len(self.pool))
    @rule(data=st.data(), size=st.integers(1, 10), evaluates=st.booleans(), pinned=st.booleans())
    def assign(self, data: st.DataObject, size: int, evaluates: bool, pinned: bool) -> None:
        replica = self.replica(data)
        versions = {policy: held.number for policy, held in replica.held.items()} if evaluates and pinned else {}
        self.num_groups += 1
        self.pool.assign(replica, f"g{self.num_groups}", range(size), versions, evaluates=evaluates)
        replica.assignments[f"g{self.num_groups}"].issued = data.draw(st.booleans())

    @precondition(lambda self: any(r.assignments for r in self.pool))
    @rule(data=st.data(), whole=st.booleans())
    def end(self, data: st.DataObject, whole: bool) -> None:
        name = data.draw(st.sampled_from(sorted(name for r in self.pool for name in r.assignments)))
        if whole:
            assert self.pool.release(name) is not None
        else:
            self.pool.resolved(name, data.draw(st.integers(0, 9)))

    # --- full scan ---------------------------------------------------------------------------------------------------

    @invariant()
    def counters_are_sums(self) -> None:
        for replica in self.pool:
            plays = replica.assignments.values()
            assert replica.num_running == sum(len(a.open_slots) for a in plays)
            assert replica.num_evaluating == sum(len(a.open_slots) for a in plays if a.evaluates)
            assert replica.num_free == replica.num_slots - replica.num_running
            for policy in ("p", "q"):
                held, told = replica.held.get(policy), replica.announced.get(policy, (-1, 0.0))[0]
                assert (policy in replica.moving) == (held is not None and told > held.number)
                pinned = next((a.pinned[policy] for a in plays if policy in a.pinned), None)
                assert replica.pinned_version(policy) == pinned
        assert self.pool.num_running == sum(replica.num_running for replica in self.pool)


TestPoolHistory = PoolHistory.TestCase
TestPoolHistory.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)


def test_the_freest_replica_that_serves_and_fits_is_chosen() -> None:
    pool = ReplicaPool(LEASE_S, lambda: 0.0)
    for number, name in enumerate(NAMES):
        held = {"p": Held(number % 2, "d")}
        pool.join(Hello(replica_id=name, incarnation="1", num_slots=8 + number, held=held))
    assert pool.freest(1, lambda replica: True) is pool.get("e")
    pool.assign(pool.get("e"), "g", range(9), {})  # type: ignore[arg-type]
    assert pool.freest(1, lambda replica: replica.held["p"].number == 0) is pool.get("c")
    assert pool.freest(11, lambda replica: replica.replica_id != "d") is pool.get("c"), "idle: a larger group fits"
    pool.drain_all("test")
    assert pool.freest(1, lambda replica: True) is None


def _group(number: int, size: int, version: int) -> TaskGroup:
    return TaskGroup(order=order(f"g{number}", size, required={"p": version}))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_orphans_are_issued_in_the_order_of_a_scan_over_all_of_them(data: Any) -> None:
    """Against a list in the order of their loss, each tried at its place."""
    groups = {f"g{n}": _group(n, data.draw(st.integers(1, 3)), data.draw(st.integers(0, 1))) for n in range(8)}
    orphans, plain = OrphanedGroups(), dict[str, None]()
    for _ in range(data.draw(st.integers(1, 25))):
        event = data.draw(st.sampled_from(["add", "add", "discard", "resolve", "issue"]))
        group = groups[data.draw(st.sampled_from(sorted(groups)))]
        if event == "add" and not group.complete:
            orphans.add(group)
            plain.setdefault(group.id)
        elif event == "discard":
            orphans.discard(group.id)
            plain.pop(group.id, None)
        elif event == "resolve" and group.unresolved:
            group.resolve(failure(group.id, group.unresolved[0]))
            if group.complete:
                orphans.discard(group.id)
                plain.pop(group.id, None)
        elif event == "issue":
            room = data.draw(st.lists(st.integers(0, 4), min_size=2, max_size=2))  # free slots, by version
            assert _issued(orphans, groups, list(room), in_turn=True) == _issued(plain, groups, list(room))
        assert len(orphans) == len(plain) and all(name in orphans for name in plain)


def _issued(waiting: Any, groups: Mapping[str, TaskGroup], room: list[int], *, in_turn: bool = False) -> list[str]:
    issued = []
    for name in (group.id for group in waiting.in_turn()) if in_turn else list(waiting):
        version, size = groups[name].order.required_versions["p"], len(groups[name].unresolved)
        if room[version] >= size:
            room[version] -= size
            issued.append(name)
            waiting.discard(name) if in_turn else waiting.pop(name)
    return issued
