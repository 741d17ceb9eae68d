"""The counters equal a full scan of the replicas, after any history; orphans are issued in order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from services.orchestrator.groups import OrphanedGroups, TaskGroup
from services.orchestrator.members import Held, Hello, ReplicaPool
from tests.unit.orchestrator.builders import failure, order

NAMES = ("a", "b", "c", "d", "e")
LEASE_S = 30.0


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
