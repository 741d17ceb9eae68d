"""Intervals in which tokens came, and shares of waiting."""

from __future__ import annotations

import pytest

from services.inference.metrics.emission import EmissionLog


def intervals(log: EmissionLog, times: list[float]) -> list[tuple[float, float]]:
    for at in times:
        log.on_tokens(1, at)
    return log.take()


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([], []),
        ([1.0], [(1.0, 1.0)]),
        ([1.0, 1.04, 1.08], [(1.0, 1.08)]),
        ([1.0, 1.04, 1.2, 1.21], [(1.0, 1.04), (1.2, 1.21)]),
    ],
)
def test_gaps_below_50_ms_are_joined(times: list[float], expected: list[tuple[float, float]]) -> None:
    assert intervals(EmissionLog(), times) == expected


def test_an_interval_goes_on_over_a_report_without_a_hole() -> None:
    log = EmissionLog()
    assert intervals(log, [1.0, 1.02]) == [(1.0, 1.02)]
    assert log.take() == []
    assert intervals(log, [1.05]) == [(1.02, 1.05)]
    assert intervals(log, [3.0]) == [(3.0, 3.0)]
