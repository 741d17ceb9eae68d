"""The GPU kit names what is outside its limits, goes on after an item that hangs, and packs packages of known versions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_kit
from benchmarks import gpu_kit as _gpu_pack


def test_figures_outside_their_limits_and_missing_ones_are_named() -> None:
    item = gpu_kit.Item(
        function="f", seconds=1, limits={"a": (2, None), "b": (None, 3), "c.d": (1, None), "e": (0.95, 1.05)}
    )
    assert list(gpu_kit.outside(item, {"a": 2, "b": 3, "c": {"d": 1}, "e": 1.0})) == []
    assert list(gpu_kit.outside(item, {"a": 1, "b": float("nan"), "c": {}, "e": 1.1})) == [
        "a is 1, expected 2 to any", "b is nan, expected any to 3", "c.d is missing", "e is 1.1, expected 0.95 to 1.05"
    ]  # fmt: skip


@pytest.mark.slow
def test_an_item_that_hangs_does_not_stop_the_next_and_its_figures_stay(tmp_path: Path) -> None:
    facts: dict[str, Any] = {"items": {}, "problems": []}
    gpu_kit.play("machine", "cpu", tmp_path, 1.1, facts)
    gpu_kit.play("varlen", "cpu", tmp_path, 300.0, facts)
    assert facts["problems"] == ["machine: not done after 1 s"]
    assert facts["items"]["varlen"]["8x32"]["forward_tflops"] > 0
    json.dumps(facts)


def test_every_package_of_the_kit_has_a_version() -> None:
    names = [requirement.partition("==") for requirement in _gpu_pack.requirements()]
    assert all(version for _, _, version in names) and ("transformers", "==", "5.23.0") in names
