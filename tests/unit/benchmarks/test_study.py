"""The study's harness is deterministic and has the stated staleness; its results are kept, resumed and invalidated."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import _virtual_player, _virtual_ring, study
from benchmarks import study as _study_cells
from benchmarks import study as _study_report
from services.common.records import Sampling, StopReason, Task, TokenSequence
from services.inference.workflows.base import Outcome, WorkflowContext

STUDY = _study_cells.Study(
    steps=4,
    batch_size=16,
    warm_start_steps=2,
    warm_start_batch=8,
    seeds=(0,),
    losses=("ppo_clip", "grpo"),
    staleness=(0, 2),
    late_modes=("drop",),
    late_staleness=(1,),
    pace=_virtual_ring.Pace(num_slots=32, evaluate_every=4, train_ticks=12),
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("study")


@pytest.fixture(scope="module")
def world_of(cache: Path) -> Callable[[Any], Any]:
    return lambda cell: _study_cells.world_of(STUDY, cell, cache)


def cell(part: str = "losses", arm: str = "ppo_clip", staleness: int = 2, seed: int = 0) -> Any:
    return _study_cells.Cell(part, arm, staleness, seed)


# -- staleness and determinism ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_trained_token_is_exactly_as_old_as_the_cell_says(world_of: Callable[[Any], Any]) -> None:
    """But for the first steps, before which there are no such old versions: step k trains what version 0 sampled."""
    curve = _virtual_ring.train_at_staleness(world_of(cell(staleness=2)), 2, seed=0)
    assert curve.ages == ((0, 0), (1, 1), (2, 2), (2, 2))
    assert len(curve.sampled) == STUDY.steps + 1


@pytest.mark.slow
def test_the_same_seed_gives_the_same_curve_and_another_seed_another_one(world_of: Callable[[Any], Any]) -> None:
    world = world_of(cell(staleness=0))
    runs = [_virtual_ring.train_at_staleness(world, 0, seed) for seed in (0, 0, 1)]
    losses = [[(step.loss, step.grad_norm, step.entropy) for step in run.steps] for run in runs]
    assert losses[0] == losses[1] and losses[0] != losses[2]
    assert runs[0].sampled == runs[1].sampled


@pytest.mark.slow
def test_the_virtual_ring_repeats_itself_and_trains_nothing_older_than_its_bound(
    world_of: Callable[[Any], Any],
) -> None:
    world = world_of(cell("late", "drop", 1))
    first, second = (_virtual_ring.VirtualRing(world, 0, STUDY.tail, STUDY.pace).run() for _ in range(2))
    assert asdict(first) == asdict(second)
    assert len(first.ages) <= 2 and sum(first.ages) == first.tokens_trained
    assert first.num_trained >= STUDY.steps * STUDY.batch_size
    assert [point.version for point in first.points] == [0, 4]


# -- the player ------------------------------------------------------------------------------------------------------


class CallsTheTool:
    """A workflow that asks for one calculation without a reply."""

    async def run(self, task: Task, context: WorkflowContext) -> Outcome:
        done = await context.gateway.execute_code(task.data["code"])
        sequence = TokenSequence(policy="model0", segments=(), reward=0.0, stop_reason=StopReason.STOP)
        return Outcome(sequences=(sequence,), reward=float(done.stdout or -1))


def play(world: Any, code: str, latency: int) -> Any:
    player = world.player(2, latency=lambda task, seed: latency)
    player._workflow = CallsTheTool()
    player.start(_virtual_player.Slot("g", 0, Task(task_id="t", data={"code": code}), Sampling(), 1))
    return player


@pytest.mark.parametrize(("code", "reward"), [("print(47*38)", 1786), ("print(5-9)", -4), ("print(07+1)", -1)])
def test_a_tool_call_is_answered_after_its_latency(world_of: Callable[[Any], Any], code: str, reward: int) -> None:
    player = play(world_of(cell()), code, latency=3)
    assert [len(player.tick()) for _ in range(2)] == [0, 0]
    (trajectory,) = player.tick()
    assert trajectory.reward == reward and (trajectory.started_at, trajectory.finished_at) == (0, 3)
    assert player.num_playing == 0


# -- cells and their results -----------------------------------------------------------------------------------------

MEASURED = {"curve": [0.1, 0.5], "greedy": 0.5, "sampled": 0.4, "clipped": 0.1, "ess": None, "gap": 0.2, "entropy": 1.0}


def run_with(
    monkeypatch: pytest.MonkeyPatch, asked: Any, path: Path, fail_at: int | None = None
) -> tuple[list[str], Any]:
    """The cells that a run of part ``losses`` measures."""
    told: list[str] = []

    def measure(study: Any, cell: Any, cache: Path) -> dict[str, Any]:
        if len(told) == fail_at:
            raise KeyboardInterrupt
        told.append(str(cell))
        return MEASURED

    monkeypatch.setattr(study, "measure", measure)
    results = _study_cells.Results(path, asked)
    try:
        study.run(asked, ["losses"], results, path.parent)
    except KeyboardInterrupt:
        pass
    return told, results


def test_an_interrupted_study_goes_on_where_it_stood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "study.jsonl"
    first, _ = run_with(monkeypatch, STUDY, path, fail_at=3)
    path.write_text(path.read_text()[:-5])  # and the last line was cut off
    second, results = run_with(monkeypatch, STUDY, path)
    assert len(first) == 3 and second == [str(c) for c in STUDY.cells(["losses"])][2:]
    assert len(results.rows("losses")) == 4
    assert run_with(monkeypatch, STUDY, path)[0] == []


@pytest.mark.parametrize("arm", sorted(_study_cells.LOSSES))
def test_every_loss_of_the_study_is_one_of_the_trainer(arm: str) -> None:
    settings = _study_cells.Study().settings(cell(arm=arm, staleness=8))
    algorithm = _study_cells.recipe_of(settings).policies["model0"].algorithm
    assert {key: getattr(algorithm, key) for key in _study_cells.LOSSES[arm]} == _study_cells.LOSSES[arm]


@pytest.mark.slow
def test_a_cell_is_measured_and_its_tables_and_pictures_are_written(cache: Path, tmp_path: Path) -> None:
    parts = ["losses", "late"]
    asked = replace(STUDY, losses=("ppo_clip",), staleness=(2,))
    results = _study_cells.Results(tmp_path / "study.jsonl", asked)
    assert study.run(asked, parts, results, cache) == 2
    document = tmp_path / "study.md"
    document.write_text("".join(f"<!-- {n} -->\n<!-- end of {n} -->\n" for n in ("ends", "losses", "late")))
    study.write_documents(results, tmp_path)
    study.write_documents(results, tmp_path)  # what stood between the marks is replaced
    text = document.read_text()
    assert text.count("| `ppo_clip` | 2 | 1 |") == 1 and text.count("| `drop` | 1 | 1 |") == 1
    assert {path.name for path in tmp_path.glob("*.png")} == {"study-losses.png", "study-late.png"}
    row = json.loads((tmp_path / "study.jsonl").read_text().splitlines()[0])
    assert len(row["curve"]) == asked.steps + 1 and 0.0 <= row["greedy"] <= 1.0
    assert _study_cells.Results(tmp_path / "study.jsonl", asked).rows("late") == results.rows("late")


# -- what is told ----------------------------------------------------------------------------------------------------


def test_intervals_are_students() -> None:
    """Half width t(.975, n - 1) s / sqrt(n): 2.776 for five runs."""
    found = _study_report.interval([0.0, 0.0, 0.0, 0.0, 1.0])
    assert found.mean == pytest.approx(0.2) and found.half == pytest.approx(2.776 * 0.4472136 / 5**0.5, rel=1e-4)
    assert str(_study_report.interval([0.5])) == "0.50"
