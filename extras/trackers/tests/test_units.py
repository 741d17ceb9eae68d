"""The units of scalars, as trackers get them and docs/trackers.md has them."""

from __future__ import annotations

import pytest

from extras.trackers.sinks import UNITS, unit_of
from tests.documented import DOCS
from tests.metrics_catalogue import step_metrics


def test_units_are_documented() -> None:
    page = (DOCS / "trackers.md").read_text()
    for _, unit in UNITS:
        assert f"`{unit}`" in page
    for metric in step_metrics():
        assert unit_of(metric.name.replace("{", "").replace("}", ""))


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("compute_s", "s"), ("trainer/seconds", "s"), ("payload_bytes", "By"), ("tokens_per_s", "{token}/s"),
        ("trainer/entropy", "nat"), ("trainer/mismatch_fresh_abs", "nat"), ("trainer/clipped_share", "1"),
        ("num_trained_tokens", "{token}"), ("rollouts_finished", "{rollout}"), ("staleness_mean", "{version}"),
        ("rollout_reward_mean", "1"), ("trainer/loss", "1"), ("bits_per_change", "bit"),
    ],
)  # fmt: skip
def test_units(name: str, unit: str) -> None:
    assert unit_of(name) == unit
