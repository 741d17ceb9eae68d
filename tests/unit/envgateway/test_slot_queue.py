"""The order in which programs and leases get a slot: two classes, the share of batch, and cancelled requests."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.envgateway.sandbox.pool import SlotQueue, batch_share


def started(queue: SlotQueue[int]) -> list[int]:
    taken = []
    while (next_one := queue.take()) is not None:
        taken.append(next_one)
    return taken


def test_interactive_requests_go_first_and_batch_leaves_them_a_slot() -> None:
    queue = SlotQueue[int](num_slots=3, batch_slots=2)
    for key in range(5):
        queue.add(key, key, is_batch=True)
    assert started(queue) == [0, 1]
    queue.add(10, 10, is_batch=False)
    queue.add(11, 11, is_batch=False)
    assert started(queue) == [10]
    queue.ended(0)
    assert started(queue) == [11]
    queue.ended(1)
    queue.ended(10)
    assert started(queue) == [2, 3]


def test_a_single_slot_serves_both() -> None:
    queue = SlotQueue[int](1, batch_share(1))
    queue.add(0, 0, is_batch=True)
    queue.add(1, 1, is_batch=False)
    assert started(queue) == [1]
    queue.ended(1)
    assert started(queue) == [0]


@given(
    st.integers(1, 5),
    st.integers(1, 5),
    st.lists(st.tuples(st.sampled_from("aaec"), st.booleans(), st.integers(0, 60)), max_size=80),
)
def test_every_order_of_events_keeps_the_bounds_and_the_order_and_loses_no_request(
    num_slots: int, batch_slots: int, events: list[tuple[str, bool, int]]
) -> None:
    queue = SlotQueue[int](num_slots, min(batch_slots, num_slots))
    waiting: dict[bool, list[int]] = {False: [], True: []}
    holding: dict[int, bool] = {}
    num_added = num_gone = 0

    def start() -> None:
        for key in started(queue):
            is_batch = key not in waiting[False]
            assert not (is_batch and waiting[False]), "an interactive request waited while a batch request started"
            assert waiting[is_batch].pop(0) == key, "first come first served in a class"
            holding[key] = is_batch
        assert len(holding) == queue.num_holding <= num_slots
        assert sum(holding.values()) <= min(batch_slots, num_slots)
        assert [queue.num_waiting(is_batch) for is_batch in (False, True)] == list(map(len, waiting.values()))
        if len(holding) < num_slots:
            assert not waiting[False]
            assert not waiting[True] or sum(holding.values()) == min(batch_slots, num_slots)

    for kind, is_batch, which in events:
        if kind == "a":
            waiting[is_batch].append(num_added)
            queue.add(num_added, num_added, is_batch)
            num_added += 1
        elif kind == "e" and holding:
            key = list(holding)[which % len(holding)]
            del holding[key]
            queue.ended(key)
            num_gone += 1
        elif kind == "c" and waiting[is_batch]:
            assert queue.remove(waiting[is_batch].pop(which % len(waiting[is_batch])))
            num_gone += 1
        start()
    while holding:
        key, _ = holding.popitem()
        queue.ended(key)
        num_gone += 1
        start()
    assert num_gone == num_added and not list(queue.waiting)
