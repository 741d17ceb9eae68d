"""Long rollouts starve, or reach the gradient, as the mode says. In virtual time, deterministic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import _starving
from services.common.config.training import BatchConfig

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


def figures(distribution: str, late: str, **settings: Any) -> dict[str, float]:
    case = _starving.Case(distribution=distribution, late=late, max_staleness=2, warm_up=8, window=12, **settings)
    found: dict[str, float] = _starving.Ring(case).run().figures(case.bound_s)
    return found


@pytest.mark.parametrize("distribution", ["pareto_1.6", "lognormal_0.9"])
def test_by_default_how_long_a_rollout_takes_does_not_decide_whether_it_is_trained(distribution: str) -> None:
    found = figures(distribution, BatchConfig().late)
    assert found["untrained_share"] == 0.0
    assert found["p_trained_above_p99"] == 1.0
    assert found["length_bias"] == pytest.approx(1.0)
    assert found["efficiency"] > figures(distribution, "drop")["efficiency"]


def test_dropping_and_masking_lose_the_longest_rollouts_and_bound_every_age() -> None:
    for late in ("drop", "mask"):
        found = figures("lognormal_0.9", late)
        assert found["age_max"] == 2
        assert found["p_trained_above_p99"] < 0.6
        assert found["length_bias"] < 0.96


def test_waiting_loses_nothing_and_makes_the_oldest_younger() -> None:
    waiting, keeping = figures("lognormal_0.9", "wait"), figures("lognormal_0.9", "keep")
    assert waiting["untrained_share"] == keeping["untrained_share"] == 0.0
    assert waiting["age_p99"] < keeping["age_p99"]


def test_the_same_case_gives_the_same_figures() -> None:
    assert figures("pareto_1.6", "drop", seed=3) == figures("pareto_1.6", "drop", seed=3)
    assert figures("pareto_1.6", "drop", seed=3) != figures("pareto_1.6", "drop", seed=4)
