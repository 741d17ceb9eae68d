"""Seeds derived from one seed: equal for equal parts, apart for others, and as wide as their consumers take."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import derived_seed, slot_seed

PARTS = st.lists(st.one_of(st.integers(0, 10**9), st.text(max_size=8)), max_size=4)


@given(st.integers(0, 2**62), PARTS, PARTS)
def test_equal_parts_give_equal_seeds_and_other_parts_others(
    seed: int, parts: list[str | int], other: list[str | int]
) -> None:
    assert (derived_seed(seed, *parts) == derived_seed(seed, *other)) == (parts == other)
    assert 0 <= derived_seed(seed, *parts) < 2**62, "an int64 on the wire, with room to count requests up from it"


def test_parts_do_not_run_into_each_other() -> None:
    assert derived_seed(1, "a/b", 1) != derived_seed(1, "a", "b/1")
    assert derived_seed(1, "1") != derived_seed(1, 1) != derived_seed(11)


def test_slots_of_a_group_have_seeds_apart_from_each_other_and_from_their_episode() -> None:
    """Golden: a change of these is a change of every seeded run."""
    group = derived_seed(1, "train", 0)
    seeds = {group, *(slot_seed(group, index) for index in range(64))}
    assert len(seeds) == 65
    assert group == 3414612118902301450
    assert [slot_seed(group, index) for index in range(2)] == [3545230144194829700, 516886235902010194]
