"""The race finds the hit that a curve has, counts every process of a side, and keeps the results."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import _bench, _race_programs, race, where_time_goes
from benchmarks import race as _race_arms
from benchmarks import race as _race_curves
from benchmarks import race as _race_report
from services.common.records import RolloutPhase, RolloutTiming
from services.orchestrator.journal import entries
from services.orchestrator.journal.journal import Journal
from tests.unit.orchestrator.builders import trajectory

Chunk = _race_curves.Chunk
CELL = _race_arms.Cell("code", "isolated", 1)


def chunk(second: float, num: int, reward: float) -> Any:
    return Chunk(wall_s=second, cpu_s=2 * second, num=num, reward=reward)


@given(st.lists(st.tuples(st.integers(1, 40), st.floats(0, 1)), max_size=40), st.integers(1, 200))
def test_a_window_is_the_fewest_last_chunks_with_enough_rollouts(parts: list[tuple[int, float]], window: int) -> None:
    chunks = [chunk(i, num, num * mean) for i, (num, mean) in enumerate(parts)]
    for end, mean in _race_curves.windows(chunks, window):
        held = chunks[: chunks.index(end) + 1]
        begin = max(i for i in range(len(held)) if sum(c.num for c in held[i:]) >= window)
        expected = sum(c.reward for c in held[begin:]) / sum(c.num for c in held[begin:])
        assert mean == pytest.approx(expected, abs=1e-6)


def test_rollouts_are_chunked_in_the_order_of_their_ends_and_the_rest_is_left_out() -> None:
    chunks = _race_curves.chunked([(float(i), 2.0 * i, 1.0) for i in range(7)], 3)
    assert [(c.wall_s, c.cpu_s, c.num, c.reward) for c in chunks] == [(2.0, 4.0, 3, 3.0), (5.0, 10.0, 3, 3.0)]


def test_seconds_of_grandchildren_and_of_the_dead_count_for_their_component() -> None:
    times = _bench.ProcessTimes
    tree = {
        1: times(0, 1.0, 0.0),
        2: times(1, 2.0, 0.0),
        3: times(2, 4.0, 8.0),
        4: times(3, 16.0, 32.0),
        9: times(0, 64.0, 64.0),
    }
    found = _bench.by_component(tree, 1, {3: "envgateway"})
    assert found["envgateway"] == 4.0
    assert found["envgateway/children"] == 8.0 + 16.0 + 32.0
    assert sum(found.values()) == 63.0  # another tree's are not counted


def test_the_seconds_of_a_component_that_was_waited_for_count_once() -> None:
    curve = _bench.CpuCurve()
    curve.add(0.0, {"launcher": 1.0, "launcher/children": 2.0, "envgateway": 4.0, "envgateway/children": 8.0})
    curve.add(1.0, {"launcher": 1.0, "launcher/children": 14.0})
    assert curve.components[-1] == {
        "launcher": 1.0,
        "launcher/children": 2.0,
        "envgateway": 4.0,
        "envgateway/children": 8.0,
    }
    curve.add(2.0, {"launcher": 1.5, "launcher/children": 14.5})
    assert curve.total_at(2.0) == 16.0


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("def f(x): return (x+3)*7", 1.0),
        ("def f(x): return x+3*7", 0.0),
        ("def f(x): return x +", 0.0),
        ("def g(x): return (x+3)*7", 0.0),
        ("def f(x): return f(x)", 0.0),
        ("def f(x):\n while 1: pass", 0.0),
        ("import os\ndef f(x): return (x+3)*7", 0.0),
        ("", 0.0),
    ],
)
def test_the_reward_in_process_is_that_of_the_tests(completion: str, reward: float) -> None:
    cases = [{"args": [value], "expected": (value + 3) * 7} for value in (-4, 0, 5)]
    assert _race_programs.passes({"tests": {"entry_point": "f", "cases": cases}}, completion) == reward


@pytest.mark.parametrize(
    "code", ["print(9**9**9)", "print(1<<9999999999)", "while 1: print(1)", "print(1/0)", "print("]
)
def test_the_tool_in_process_comes_back_from_a_program_that_would_not(code: str) -> None:
    began = time.process_time()
    assert "Error" in (told := _race_programs.run_tool(code)) or told.startswith("Refused")
    assert time.process_time() - began < 5


def row(arm: str, seed: int, wall_s: float | None, end_s: float = 90.0) -> dict[str, Any]:
    return {
        "task": "code", "arm": arm, "seed": seed, "rollouts": 2560, "end_wall_s": end_s, "end_cpu_s": 2 * end_s,
        "hit_wall_s": wall_s, "hit_cpu_s": wall_s and 2 * wall_s, "chunks": [[1.0, 2.0, 1280, 640.0], [2.0, 4.0, 1280, 1200.0]],
    }  # fmt: skip


def test_ratios_are_of_trls_best_setting_and_say_what_was_cut_off() -> None:
    rows = [row("isolated", 1, 10.0), row("isolated", 2, 20.0), row("trl-16x8", 1, 80.0), row("trl-16x8", 2, 80.0),
            row("trl-32x8", 1, 40.0), row("trl-32x8", 2, None)]  # fmt: skip
    found = _race_report.ratios(rows)
    assert found["best_trl"]["code"] == "trl-32x8"
    assert found["code_ratio"] == pytest.approx((4.0 + 4.5) / 2)
    assert found["code_cpu_ratio"] == pytest.approx((4.0 + 4.5) / 2)
    assert found["cut_off"] == ["code trl-32x8 seed 2"]
    assert found["tool_ratio"] is None and found["code_inprocess_ratio"] is None


def test_finished_runs_are_kept_and_torn_lines_and_lower_caps_are_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "race.jsonl"
    results = race.Results(path)
    results.add(CELL, {"hit_wall_s": None, "cap_s": 30.0})
    assert results.has(CELL, 30.0) and not results.has(CELL, 60.0)
    path.write_text(path.read_text() + '{"task": "co')
    again = race.Results(path)
    assert again.has(CELL, 30.0)
    other = _race_arms.Cell("code", "isolated", 2)
    again.add(other, {"hit_wall_s": 5.0, "cap_s": 30.0})
    assert race.Results(path).has(other, 9999.0)


async def test_phases_of_rollouts_are_means_over_what_the_journal_has(tmp_path: Path) -> None:
    phases = (
        RolloutPhase(what="generate", begin_s=0.0, seconds=1.5),
        RolloutPhase(what="reward", begin_s=1.5, seconds=0.25),
    )
    journal = Journal(tmp_path / "journal")
    journal.start()
    for index, timing in enumerate((RolloutTiming(accepted_at=9.0, phases=phases), RolloutTiming(accepted_at=10.0))):
        played = replace(trajectory("g", index), started_at=10.0, finished_at=12.0, timing=timing)
        await journal.append(entries.TRAJECTORY, f"g/{index}", played)
    await journal.close()
    found = where_time_goes.rollout_phases(tmp_path)
    assert found["num"] == 2
    assert found["phases"]["generate"] == {"ms": 750.0, "per_rollout": 0.5}
    assert found["phases"]["waiting for a slot"]["ms"] == 500.0
    assert found["phases"]["between"]["ms"] == pytest.approx((0.25 + 2.0) / 2 * 1e3)


@pytest.mark.parametrize("task", ["code", "tool"])
def test_both_arms_of_ours_play_with_the_settings_of_the_recipe(task: str) -> None:
    isolated, inside = (
        _race_arms.settings_of(_race_arms.Cell(task, arm, 1))["recipe"]["workflow"]["settings"]
        for arm in ("isolated", "inprocess")
    )
    assert {**inside, "reward": isolated["reward"]} == isolated


@pytest.mark.parametrize("task", ["code", "tool"])
def test_the_arm_with_the_advantages_of_grpo_differs_in_the_policy_alone(task: str) -> None:
    recipe, grpo = (
        _race_arms.settings_of(_race_arms.Cell(task, arm, 1))["recipe"] for arm in ("isolated", "isolated-grpo")
    )
    policies = grpo.pop("policies"), recipe.pop("policies")
    assert grpo == recipe
    assert [p["model0"]["algorithm"]["advantage"] for p in policies] == ["grpo", "reinforce"]


def test_each_ratio_compares_with_the_settings_of_its_estimator() -> None:
    seconds = {"isolated": 2.0, "isolated-grpo": 3.0, "trl-8x8": 6.0, "trl-16x8": 9.0, "trl-8x8-reward": 5.0}
    rows = [
        {"task": "code", "arm": arm, "seed": 1, "hit_wall_s": wall, "hit_cpu_s": wall} for arm, wall in seconds.items()
    ]
    found = _race_report.ratios(rows)
    assert (found["code_ratio"], found["code_grpo_ratio"], found["code_changed_ratio"]) == (3.0, 2.0, 2.5)
    assert found["code_inprocess_ratio"] is None
