from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.orchestrator.buffer.experience import ExperienceBuffer
from services.orchestrator.groups import AdvantageGroup, advantage_groups
from tests.unit.orchestrator.builders import complete_group


def made(name: str, version: int, size: int = 2) -> AdvantageGroup:
    return advantage_groups(complete_group(name, [float(i) for i in range(size)], version))[0]


def names(groups: list[AdvantageGroup]) -> list[str]:
    return [group.task_group_id for group in groups]


def test_the_oldest_version_is_trained_first_and_ties_by_arrival() -> None:
    buffer = ExperienceBuffer(batch_size=6, max_staleness=9)
    for name, version in [("new", 3), ("old", 1), ("older", 0), ("old2", 1)]:
        buffer.add(made(name, version))
    assert names(buffer.take()) == ["older", "old", "old2"]


def test_fifo_takes_what_completed_first() -> None:
    buffer = ExperienceBuffer(batch_size=4, max_staleness=9, order="fifo")
    for name, version in [("first", 3), ("second", 0), ("third", 1)]:
        buffer.add(made(name, version))
    assert names(buffer.take()) == ["first", "second"]


def test_a_batch_takes_whole_groups_until_it_is_full() -> None:
    buffer = ExperienceBuffer(batch_size=4, max_staleness=9)
    for name in "abc":
        buffer.add(made(name, 0, size=3))
    taken = buffer.take()
    assert sum(group.size for group in taken) == 6
    assert buffer.num_sequences == 3
    assert not buffer.ready


def test_what_is_too_old_leaves_eagerly_wherever_it_stands() -> None:
    buffer = ExperienceBuffer(batch_size=2, max_staleness=1)
    for name, version in [("a", 2), ("b", 0), ("c", 1)]:
        buffer.add(made(name, version))
    assert names(buffer.advance(1)) == []
    assert names(buffer.advance(2)) == ["b"]
    assert buffer.num_sequences == 4
    assert not buffer.add(made("late", 0))
    assert names(buffer.take()) == ["c"]


def test_groups_of_a_recorded_batch_are_taken_by_name() -> None:
    buffer = ExperienceBuffer(batch_size=2, max_staleness=9)
    for name in "abc":
        buffer.add(made(name, 0))
    assert names(buffer.take_named({"b/0/0", "b/1/0", "gone/0/0"})) == ["b"]
    assert names(buffer.take()) == ["a"]
    assert names(buffer.take()) == ["c"]


def test_a_batch_that_is_not_there_cannot_be_taken() -> None:
    with pytest.raises(ValueError, match="0 of 2"):
        ExperienceBuffer(batch_size=2, max_staleness=1).take()


@given(
    versions=st.lists(st.integers(0, 5), max_size=40),
    batch_size=st.integers(1, 8),
    max_staleness=st.integers(0, 3),
)
def test_nothing_is_lost_or_taken_twice(versions: list[int], batch_size: int, max_staleness: int) -> None:
    buffer = ExperienceBuffer(batch_size, max_staleness)
    left: list[str] = []
    for arrival, version in enumerate(versions):
        if not buffer.add(made(str(arrival), version, size=1 + arrival % 3)):
            left.append(str(arrival))
        if arrival % 5 == 4:
            left += names(buffer.advance(arrival // 5))
        if buffer.ready and arrival % 2:
            taken = buffer.take()
            assert all((group.min_version or 0) >= buffer.version - max_staleness for group in taken)
            left += names(taken)
    while buffer.ready:
        left += names(buffer.take())
    assert len(left) == len(set(left)) == len(versions) - len(buffer)
