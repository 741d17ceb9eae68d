"""Intervals in which tokens came, and shares of waiting."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from services.inference.replica import EmissionLog


def intervals(log: EmissionLog, times: list[float]) -> list[tuple[float, float]]:
    for at in times:
        log.on_tokens(1, at)
    return log.take()


def test_an_interval_goes_on_over_a_report_without_a_hole() -> None:
    log = EmissionLog()
    assert intervals(log, [1.0, 1.02]) == [(1.0, 1.02)]
    assert log.take() == []
    assert intervals(log, [1.05]) == [(1.02, 1.05)]
    assert intervals(log, [3.0]) == [(3.0, 3.0)]


@given(
    step_s=st.floats(0.001, 5.0),
    bursts=st.lists(st.tuples(st.integers(4, 60), st.floats(8.0, 100.0)), min_size=3, max_size=12),
    report_s=st.floats(1.0, 10.0),
)
def test_the_intervals_cover_the_time_of_generation_whatever_a_decoding_step_takes(
    step_s: float, bursts: list[tuple[int, float]], report_s: float
) -> None:
    """Bursts of tokens, one each step, with pauses of 8 steps or more between them; reports at intervals."""
    log, now, reported_at = EmissionLog(), 1000.0, 1000.0
    found: list[tuple[float, float]] = []
    generating = 0.0
    for number, (num_steps, pause_steps) in enumerate(bursts):
        for _ in range(num_steps if number else num_steps + 12):
            now += step_s
            log.on_tokens(1, now)
            if now - reported_at > report_s:
                found += log.take()
                reported_at = now
        if number:  # the first burst teaches the log what a step takes
            generating += (num_steps - 1) * step_s
        now += max(pause_steps * step_s, 0.2)
    found += log.take()
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(found))
    covered = sum(end - begin for begin, end in found)
    first = (bursts[0][0] + 11) * step_s
    assert generating * 0.99 <= covered + 1e-6 <= (generating + first) * 1.01 + 2e-6
