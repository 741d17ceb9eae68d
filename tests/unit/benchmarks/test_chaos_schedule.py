"""The schedule of the chaos benchmark: seeded, even over kinds, and flips of exactly one bit."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.chaos import (  # type: ignore[import-not-found]
    MEASURED,
    Kind,
    flip,  # type: ignore[import-not-found]
    schedule,
)

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


KINDS = st.sets(st.sampled_from(list(Kind)), min_size=1)


@given(seed=st.integers(0, 1000), kinds=KINDS)
def test_the_same_seed_gives_the_same_faults_and_every_kind_comes_before_any_comes_again(
    seed: int, kinds: set[Kind]
) -> None:
    first = list(islice(schedule(seed, kinds), 3 * len(kinds)))
    assert first == list(islice(schedule(seed, sorted(kinds)), 3 * len(kinds)))
    for deal in range(3):
        part = first[deal * len(kinds) : (deal + 1) * len(kinds)]
        assert Counter(fault.kind for fault in part) == Counter(kinds)
        measured = [fault.kind in MEASURED for fault in part]
        assert measured == sorted(measured, reverse=True), "kills that are measured come first"
    assert all(0 <= fault.draw < 1 and 0.5 <= fault.pause_s <= 2.0 for fault in first)


def test_other_seeds_give_other_faults() -> None:
    assert len({tuple(islice(schedule(seed), 40)) for seed in range(20)}) == 20


@pytest.mark.parametrize("draw", [0.0, 0.37, 0.999])
def test_a_flip_changes_one_bit_of_the_span_that_it_names(tmp_path: Path, draw: float) -> None:
    before = bytes(range(200))
    file = tmp_path / "file"
    file.write_bytes(before)
    flip(file, draw, offset=50, length=20)
    changed = [place for place, (a, b) in enumerate(zip(before, file.read_bytes(), strict=True)) if a != b]
    assert len(changed) == 1 and 50 <= changed[0] < 70
    assert (before[changed[0]] ^ file.read_bytes()[changed[0]]).bit_count() == 1
    flip(file, draw, offset=50, length=20)
    assert file.read_bytes() == before
