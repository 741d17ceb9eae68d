"""Races Rollmill against TRL's GRPO to one goal, from one checkpoint, on the same two cores.

Both demonstrations of the repository are trained by both sides, in turns, never at once:

    code    recipes/quickstart-code: one-line programs, judged on hidden inputs
    tool    recipes/quickstart: arithmetic with a calculator, at most three turns

    isolated    Rollmill as the recipe has it: every program in the sandbox
    inprocess   Rollmill with reward and tool as plain functions in the replica's process
    trl-PxG     TRL's GRPOTrainer with P prompts of G rollouts in a batch, reward and tool as plain functions
    isolated-grpo, trl-PxG-reward
                the estimator of the other side: Rollmill with GRPO's advantages, and TRL changed so that the reward is
                the advantage, as in the recipes

The hit is the first moment at which the mean over the last 1,280 sampled rollouts, those of dropped groups included, is
.9. Seconds count from version 0: imports, the loading of the model and the making of the checkpoint do not. CPU seconds
are those of all processes of a side. No side evaluates. ``code_ratio`` and ``tool_ratio`` are TRL's seconds to the hit
over those of Rollmill isolated, ``…_inprocess_ratio`` over those of Rollmill in process, ``…_cpu_ratio`` the same of
CPU seconds; medians over seeds, TRL at its best setting. ``…_grpo_ratio`` has GRPO's advantages on both sides,
``…_changed_ratio`` the reward as advantage on both sides. A run that has not hit at the cap counts with its end
(``cut_off``).

Runs are kept in docs/race.jsonl as they end, so an interrupted race continues; ``--quick`` keeps no results: one seed,
TRL at the setting that was best. ``docs/race.md`` has the choices and their reasons; its table and picture are written
here.

    make race-env
    python benchmarks/race.py [--quick] [--tasks code tool] [--arms isolated trl-32x8 ...] [--seeds 3] [--cap 300]
    [--again]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import structlog

from benchmarks._bench import CpuCurve, Sampler, median_and_spread, pin, report_facts, report_nothing
from benchmarks.study import put_into
from services.cli.console import pyplot
from services.cli.inspect.plot import STYLE
from services.common.config.loading import load_recipe
from services.common.config.recipe import Recipe
from services.common.importing import load_object
from services.orchestrator.journal import entries
from services.orchestrator.journal.reader import JournalReader
from services.trainer.warm_start import make_starting_checkpoint

# --- The result of a side of the race: chunks of sampled rollouts over time, and the time of the goal. Pure.


WINDOW = 1280  # rollouts, at least, whose mean is compared with the goal
GOAL = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    wall_s: float
    cpu_s: float
    num: int
    reward: float  # sum


def windows(chunks: Sequence[Chunk], window: int = WINDOW) -> Iterator[tuple[Chunk, float]]:
    """The end of each window and its mean reward: the fewest last chunks with at least ``window`` rollouts."""
    held: deque[Chunk] = deque()
    num, reward = 0, 0.0
    for chunk in chunks:
        held.append(chunk)
        num, reward = num + chunk.num, reward + chunk.reward
        while num - held[0].num >= window:
            gone = held.popleft()
            num, reward = num - gone.num, reward - gone.reward
        if num >= window:
            yield chunk, reward / num


def hit(chunks: Sequence[Chunk], goal: float = GOAL, window: int = WINDOW) -> Chunk | None:
    """The chunk with which the mean first reaches the goal; None if never.

    >>> chunks = [Chunk(wall_s=s, cpu_s=2 * s, num=640, reward=640.0 * (s > 1)) for s in range(5)]
    >>> hit(chunks).wall_s
    3
    """
    return next((chunk for chunk, mean in windows(chunks, window) if mean >= goal), None)


def chunked(ended: Sequence[tuple[float, float, float]], size: int) -> list[Chunk]:
    """(wall, CPU, reward) of each rollout, in the order of their ends; an incomplete last chunk is left out."""
    return [
        Chunk(wall_s=part[-1][0], cpu_s=part[-1][1], num=size, reward=sum(reward for _, _, reward in part))
        for part in (ended[begin : begin + size] for begin in range(0, len(ended) - size + 1, size))
    ]


# --- The sides of the race and how one run of each is made: settings, command, and the resulting chunks.


ROOT = Path(__file__).resolve().parents[1]
RECIPES = {"code": "quickstart-code", "tool": "quickstart"}
POLICY = "model0"
Side = Literal["isolated", "inprocess", "trl"]
CHUNK = 64  # rollouts of a chunk of our curve
LOOK_S = 1.0  # between two looks into the journal
START_S = 180.0  # for imports and the loading of the model, which do not count
STOP_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrlSetting:
    """Settings of TRL beside those of the task; a batch is ``prompts`` times the group size."""

    prompts: int
    minibatches: int = 1  # optimizer updates per generated batch
    learning_rate: float = 1e-3  # the recipes' own
    schedule: str = "constant"
    loss_type: str = "dapo"  # TRL's default: GRPO, clipped, a mean over all tokens of the batch
    advantage: Literal["group", "reward"] = "group"  # TRL's, or the reward alone: a change of TRL's code
    threads: int = 1  # of torch


TRL = {
    "trl-32x8": TrlSetting(prompts=32),
    "trl-16x8": TrlSetting(prompts=16),
    "trl-8x8": TrlSetting(prompts=8),
    "trl-32x8-2t": TrlSetting(prompts=32, threads=2),
}
# TRL has no setting for the recipes' estimator: `_race_trl.py` puts the reward where TRL put the group's advantage.
CHANGED_TRL = {
    "trl-16x8-reward": TrlSetting(prompts=16, advantage="reward"),
    "trl-8x8-reward": TrlSetting(prompts=8, advantage="reward"),
}
ALL_TRL = {**TRL, **CHANGED_TRL}
_GRPO = f"policies.{POLICY}.algorithm.advantage"
_SIZE, _DROPS = f"policies.{POLICY}.batch.size", f"policies.{POLICY}.batch.dynamic_sampling"
OURS: dict[str, dict[str, dict[str, str]]] = {
    "isolated": {},
    "inprocess": {
        "code": {"workflow.settings.reward": "benchmarks._race_programs:passes"},
        "tool": {"workflow.name": "benchmarks._race_workflow:InProcessToolUse"},
    },
    # The estimator that TRL has, with the batches that the recipes had for it (ADR 60).
    "isolated-grpo": {
        "code": {_GRPO: "grpo"},
        "tool": {_GRPO: "grpo", _SIZE: "128", _DROPS: "true"},
    },
}
ARMS = (*OURS, *ALL_TRL)


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of the race."""

    task: str
    arm: str
    seed: int

    def __str__(self) -> str:
        return f"{self.task} {self.arm} seed {self.seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A run up to the hit or the cap."""

    chunks: list[Chunk]
    profile: Mapping[str, float]  # CPU seconds by component, to the hit

    def as_row(self) -> dict[str, Any]:
        found = hit(self.chunks)
        last = self.chunks[-1] if self.chunks else None
        return {
            "hit_wall_s": found and round(found.wall_s, 2),
            "hit_cpu_s": found and round(found.cpu_s, 2),
            "end_wall_s": last and round(last.wall_s, 2),
            "end_cpu_s": last and round(last.cpu_s, 2),
            "rollouts": sum(chunk.num for chunk in self.chunks),
            "profile": {name: round(seconds, 2) for name, seconds in self.profile.items()},
            "chunks": [[round(c.wall_s, 2), round(c.cpu_s, 2), c.num, round(c.reward, 3)] for c in self.chunks],
        }


def recipe_of(task: str, overrides: Mapping[str, Any] | None = None) -> Recipe:
    return load_recipe(
        ROOT / "recipes" / RECIPES[task], [f"{k}={v}" for k, v in (overrides or {}).items()], environment={}
    )


def settings_of(cell: Cell) -> dict[str, Any]:
    """The inputs of a cell: after a change the cell is measured again."""
    recipe = recipe_of(cell.task, our_overrides(cell) if cell.arm in OURS else {})
    told = recipe.model_dump(mode="json", exclude={"run": {"id", "dir"}})
    return {"recipe": told, "trl": asdict(ALL_TRL[cell.arm]) if cell.arm in ALL_TRL else None}


def our_overrides(cell: Cell) -> dict[str, Any]:
    own = OURS[cell.arm].get(cell.task, {})
    if "workflow.name" in own:  # another workflow begins without the recipe's settings
        own = {**own, "workflow.settings": json.dumps(recipe_of(cell.task).workflow.settings)}
    return {
        "run.seed": cell.seed,
        "evaluation.at_start": "false",
        "evaluation.at_end": "false",
        "evaluation.every": 0,
        "run.until": "null",
        **own,
    }


def checkpoint_of(task: str, cache: Path) -> Path:
    """The starting checkpoint that every run of a task shares, made unless in ``cache``."""
    return make_starting_checkpoint(recipe_of(task), POLICY, cache / task)


def run_cell(cell: Cell, cache: Path, folder: Path, cap_s: float, trl_python: Path) -> Result:
    """One run in ``folder``, which is empty."""
    checkpoint = checkpoint_of(cell.task, cache)
    if cell.arm in ALL_TRL:
        return _run_trl(cell, checkpoint, folder, cap_s, trl_python)
    return _run_ours(cell, checkpoint, folder, cap_s)


def _run_trl(cell: Cell, checkpoint: Path, folder: Path, cap_s: float, python: Path) -> Result:
    recipe = recipe_of(cell.task, {"run.seed": cell.seed})
    data = recipe.data.train
    rows = load_object(data.generator)(seed=cell.seed, **data.settings)
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    setting = ALL_TRL[cell.arm]
    settings = {
        **asdict(setting),
        "task": cell.task,
        "checkpoint": str(checkpoint),
        "rows": str(folder / "rows.jsonl"),
        "output": str(folder / "curve.jsonl"),
        "window": WINDOW,
        "goal": GOAL,
        "cap_s": cap_s,
        "seed": cell.seed,
        "group_size": recipe.rollout.group_size,
        "max_steps": 100_000,
        "max_new_tokens": recipe.sampling.max_new_tokens,
        "max_turns": recipe.workflow.settings.get("max_turns", 1),
        "context_length": recipe.policies[POLICY].model.context_length,
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    environment = {
        **os.environ, "OMP_NUM_THREADS": str(setting.threads), "TOKENIZERS_PARALLELISM": "false",
        "TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    environment["PYTHONPATH"] = str(ROOT)  # nothing else of this environment
    with (folder / "log").open("w") as log:
        command = [str(python), str(ROOT / "benchmarks" / "_race_trl.py"), str(folder / "settings.json")]
        process = subprocess.Popen(
            command, env=environment, cwd=folder, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(START_S + 2 * cap_s)
        finally:
            _end(process)
    if code:
        raise RuntimeError(f"{cell} ended with {code}: {(folder / 'log').read_text()[-2000:]}")
    lines = map(json.loads, (folder / "curve.jsonl").read_text().splitlines())
    chunks = [
        Chunk(wall_s=line["wall_s"], cpu_s=line["cpu_s"], num=len(line["rewards"]), reward=sum(line["rewards"]))
        for line in lines
    ]
    found = hit(chunks) or chunks[-1]
    return Result(chunks=chunks, profile={"trl": found.cpu_s})


def _run_ours(cell: Cell, checkpoint: Path, folder: Path, cap_s: float) -> Result:
    run_dir = folder / "run"
    overrides = {
        **our_overrides(cell), "warm_start": "{}", f"policies.{POLICY}.model.path": checkpoint,
        "run.dir": folder, "run.id": run_dir.name,
    }  # fmt: skip
    command = [sys.executable, "-m", "services.cli", "run", str(ROOT / "recipes" / RECIPES[cell.task])]
    for key, value in overrides.items():
        command += ["--set", f"{key}={value}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, env=environment, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        sampler = Sampler(process.pid, run_dir / "pids.json")
        try:
            rollouts = _follow(run_dir, process, cap_s)
        finally:
            sampler.close()
            _end(process)
    if not rollouts.ended:
        raise RuntimeError(f"{cell} sampled no rollout: {(folder / 'log').read_text()[-2000:]}")
    return rollouts.result(sampler.curve)


class _Rollouts:
    """The rollouts in a run's journal, read on from the last position."""

    def __init__(self, run_dir: Path) -> None:
        self._reader = JournalReader(run_dir / "journal")
        self._number = -1
        self.began = 0.0
        self.ended: list[tuple[float, float]] = []  # time of day, reward

    def read_on(self) -> None:
        for row in self._reader.select("r.number > ? AND r.kind = ?", (self._number, entries.TRAJECTORY)):
            record = self._reader.load(row)
            self._number = row.number
            if record is not None:
                accepted = record["timing"]["accepted_at"] or record["started_at"]
                self.began = min(self.began or accepted, accepted)
                self.ended.append((record["finished_at"], record["reward"]))
        self.ended.sort()

    def result(self, curve: CpuCurve) -> Result:
        before = curve.components_at(self.began)
        cpu_before = sum(before.values())
        ended = [(at - self.began, curve.total_at(at) - cpu_before, reward) for at, reward in self.ended]
        chunks = chunked(ended, CHUNK)
        found = hit(chunks) or chunks[-1]
        until = curve.components_at(self.began + found.wall_s)
        return Result(chunks=chunks, profile={name: until[name] - before.get(name, 0.0) for name in until})

    def is_over(self, cap_s: float) -> bool:
        points = [(at - self.began, 0.0, reward) for at, reward in self.ended]
        return bool(points) and (points[-1][0] > cap_s or hit(chunked(points, CHUNK)) is not None)


def _follow(run_dir: Path, process: subprocess.Popen[bytes], cap_s: float) -> _Rollouts:
    """Until the goal or the cap is reached, or the run has ended by itself."""
    deadline = time.monotonic() + START_S
    while not (run_dir / "journal").is_dir() or not any((run_dir / "journal").iterdir()):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the run in {run_dir} did not begin: see {run_dir.parent / 'log'}")
        time.sleep(0.1)
    rollouts = _Rollouts(run_dir)
    while True:
        rollouts.read_on()
        if rollouts.is_over(cap_s) or process.poll() is not None:
            return rollouts
        if not rollouts.ended and time.monotonic() > deadline:
            raise RuntimeError(
                f"the run in {run_dir} sampled no rollout in {START_S:g} s: see {run_dir.parent / 'log'}"
            )
        time.sleep(LOOK_S)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Stop a side with all its children."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            pass
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


# --- Ratios, table and picture of the race, from the rows of its result file. Pure but for writing the picture.


Row = Mapping[str, Any]
SMOOTHED = 512  # rollouts that a point of a drawn curve is the mean of
COLORS = {"isolated": "C0", "inprocess": "C2", "isolated-grpo": "C1", "trl": "C3", "changed": "C4"}
LABELS = {
    "isolated": "Rollmill, isolated",
    "inprocess": "Rollmill, in process",
    "isolated-grpo": "Rollmill, isolated, GRPO's advantages",
}
# The keys: our arm, and the settings of TRL that it is compared with.
PAIRS: Mapping[str, tuple[str, Iterable[str]]] = {
    "": ("isolated", TRL),
    "_inprocess": ("inprocess", TRL),
    "_grpo": ("isolated-grpo", TRL),
    "_changed": ("isolated", CHANGED_TRL),
    "_changed_inprocess": ("inprocess", CHANGED_TRL),
}


def best_trl(rows: Sequence[Row], task: str, arms: Iterable[str] = tuple(TRL)) -> str | None:
    """The setting of TRL with the least seconds to the hit, a run that was cut off counting with its end."""
    seconds: dict[str, float] = {}
    for arm in arms:
        of_arm = [_reached(row, "wall_s") for row in rows if row["task"] == task and row["arm"] == arm]
        if of_arm:
            seconds[arm] = statistics.fmean(of_arm)
    return min(seconds, key=lambda arm: seconds[arm], default=None)


def ratios(rows: Sequence[Row]) -> dict[str, Any]:
    """``<task>[_inprocess][_cpu]_ratio`` with its spread over seeds: seconds of TRL's best setting over ours.

    ``_grpo``: with GRPO's advantages on both sides. ``_changed``: with the reward as advantage on both sides.

    A ratio with a run of TRL that was cut off is a lower bound, one with a run of ours an upper bound: ``cut_off``
    names the runs. Where both were cut off there is none.
    """
    found: dict[str, Any] = {}
    by_cell = {(row["task"], row["arm"], row["seed"]): row for row in rows}
    for task in RECIPES:
        for name_of_pair, (arm, settings) in PAIRS.items():
            theirs = best_trl(rows, task, settings)
            seeds = [s for (t, a, s) in by_cell if (t, a) == (task, arm) and (task, theirs, s) in by_cell]
            for what, suffix in (("wall_s", ""), ("cpu_s", "_cpu")):
                pairs = [(by_cell[task, str(theirs), seed], by_cell[task, arm, seed]) for seed in seeds]
                values = [_reached(a, what) / _reached(b, what) for a, b in pairs if _has_hit(a) or _has_hit(b)]
                name = f"{task}{name_of_pair}{suffix}_ratio"
                found[name], found[f"{name}_spread"] = median_and_spread(values) if values else (None, None)
    found["best_trl"] = {task: best_trl(rows, task) for task in RECIPES}
    found["cut_off"] = sorted(f"{row['task']} {row['arm']} seed {row['seed']}" for row in rows if not _has_hit(row))
    return found


def table(rows: Sequence[Row]) -> str:
    """Markdown: a line per task and arm, seconds to the hit as median and range over seeds."""
    cells: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        cells[row["task"], row["arm"]].append(row)
    lines = [
        f"| task | side | runs | wall to {GOAL:g}, s | CPU to {GOAL:g}, s | rollouts | rollouts per CPU second |",
        "|---|---|---|---|---|---|---|",
    ]
    for (task, arm), of_cell in sorted(cells.items()):
        wall, cpu = (_range(of_cell, what) for what in ("wall_s", "cpu_s"))
        rollouts = statistics.median(row["rollouts"] for row in of_cell)
        rate = statistics.median(row["rollouts"] / row["end_cpu_s"] for row in of_cell)
        lines.append(f"| {task} | {_label(arm)} | {len(of_cell)} | {wall} | {cpu} | {rollouts:,.0f} | {rate:.0f} |")
    return "\n".join(lines)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Two lines of panels, one per task: reward over seconds, and over CPU seconds, with the range over seeds."""
    plt = pyplot()
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(len(RECIPES), 2, figsize=(12, 8), layout="constrained", squeeze=False)
        for line, task in zip(axes, RECIPES, strict=True):
            for ax, what, told in zip(line, ("wall_s", "cpu_s"), ("seconds", "CPU seconds"), strict=True):
                for arm in (*OURS, best_trl(rows, task), best_trl(rows, task, CHANGED_TRL)):
                    of_cell = [row for row in rows if row["task"] == task and row["arm"] == arm]
                    if of_cell and arm is not None:
                        _band(ax, of_cell, lambda chunk, what=what: getattr(chunk, what), arm)
                ax.axhline(GOAL, color="0.6", linewidth=0.8, linestyle=":")
                ax.set(title=RECIPES[task], xlabel=f"{told} since version 0", ylabel="reward, sampled", ylim=(0, 1))
                ax.set_xlim(left=0)
                if ax.get_legend_handles_labels()[0]:
                    ax.legend(fontsize=8, loc="lower right")
        figure.savefig(path, dpi=110)
        plt.close(figure)


def chunks_of(row: Row) -> list[Chunk]:
    return [Chunk(wall_s=wall, cpu_s=cpu, num=num, reward=reward) for wall, cpu, num, reward in row["chunks"]]


def _band(ax: Any, rows: Sequence[Row], of: Callable[[Chunk], float], arm: str) -> None:
    """The mean over seeds as long as all of them last, and their range."""
    import numpy as np

    curves = [[(of(chunk), mean) for chunk, mean in windows(chunks_of(row), SMOOTHED)] for row in rows]
    curves = [curve for curve in curves if curve]
    if not curves:
        return
    grid = np.linspace(max(curve[0][0] for curve in curves), min(curve[-1][0] for curve in curves), 200)
    values = np.array([np.interp(grid, *zip(*curve, strict=True)) for curve in curves])  # [num_seeds, 200]
    color = COLORS.get(arm, COLORS["changed" if arm in CHANGED_TRL else "trl"])
    ax.fill_between(grid, values.min(axis=0), values.max(axis=0), color=color, alpha=0.2, linewidth=0)
    ax.plot(grid, values.mean(axis=0), color=color, label=_label(arm))


def _label(arm: str) -> str:
    told = arm.removeprefix("trl-").replace("x", " × ").replace("-2t", ", two threads").replace("-reward", ", changed")
    return LABELS.get(arm) or f"TRL, {told}"


def _has_hit(row: Row) -> bool:
    return row["hit_wall_s"] is not None


def _reached(row: Row, what: str) -> float:
    """To the hit, or to the end of a run that was cut off."""
    return float(row["hit_" + what] or row["end_" + what])


def _range(rows: Sequence[Row], what: str) -> str:
    values = sorted(_reached(row, what) for row in rows)
    sign = "> " if any(row["hit_" + what] is None for row in rows) else ""
    told = f"{sign}{statistics.median(values):.1f}"
    return told if len(values) == 1 else f"{told} ({values[0]:.1f} to {values[-1]:.1f})"


# --- The benchmark itself.


CAP_S, QUICK_CAP_S = 300.0, 150.0
# The best in docs/race.jsonl.
QUICK_TRL = {"code": ("trl-16x8", "trl-16x8-reward"), "tool": ("trl-8x8", "trl-8x8-reward")}
TRL_PYTHON = ROOT / ".venv-race" / "bin" / "python"


class Results:
    """Finished runs, one JSON line each. A line of other settings, or one cut off, counts as not there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        text = path.read_text() if path.is_file() else ""
        self._lines = [line for line in text.splitlines() if line]
        self._rows: dict[Cell, dict[str, Any]] = {}
        for line in self._lines:
            try:
                row = json.loads(line)
            except ValueError:  # cut off while it was written
                continue
            cell = Cell(row["task"], row["arm"], row["seed"])
            if cell.arm in ARMS and row["settings"] == digest_of(cell):
                self._rows[cell] = row

    def has(self, cell: Cell, cap_s: float) -> bool:
        """Whether the cell was measured, to the hit or to no smaller a cap."""
        row = self._rows.get(cell)
        return row is not None and (row["hit_wall_s"] is not None or row["cap_s"] >= cap_s)

    def rows(self) -> list[dict[str, Any]]:
        return [self._rows[cell] for cell in sorted(self._rows, key=str)]

    def add(self, cell: Cell, values: Mapping[str, Any]) -> None:
        row = {**asdict(cell), "settings": digest_of(cell), **values}
        self._rows[cell] = row
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write("\n" * self._is_torn() + json.dumps(row) + "\n")

    def _is_torn(self) -> bool:
        return self._path.is_file() and not self._path.read_bytes().endswith(b"\n") and self._path.stat().st_size > 0


def digest_of(cell: Cell) -> str:
    return hashlib.blake2b(json.dumps(settings_of(cell), sort_keys=True).encode(), digest_size=8).hexdigest()


def cells(tasks: Sequence[str], arms: Mapping[str, Sequence[str]], num_seeds: int) -> Iterator[Cell]:
    """Seeds outermost, and in each the sides in turns: a slow hour of the machine slows all of them."""
    for seed in range(1, num_seeds + 1):
        for task in tasks:
            yield from (Cell(task, arm, seed) for arm in arms[task])


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
    return {"cpu": model, "cores": len(os.sched_getaffinity(0)), "load": round(os.getloadavg()[0], 2)}


def main() -> None:
    options = _options()
    if not options.trl_python.is_file():
        report_nothing("race", f"{options.trl_python} is missing: make race-env")
        return
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    cores = pin(2)
    num_seeds = options.seeds or (1 if options.quick else 3)
    cap_s = options.cap or (QUICK_CAP_S if options.quick else CAP_S)
    quick = {task: ("isolated", "inprocess", *QUICK_TRL[task]) for task in RECIPES}
    arms = {task: options.arms or (quick[task] if options.quick else ARMS) for task in RECIPES}
    with tempfile.TemporaryDirectory(prefix="rollmill-race-") as folder:
        results = Results(Path(folder) / "race.jsonl" if options.quick else options.results)
        for number, cell in enumerate(cells(options.tasks, arms, num_seeds)):
            if results.has(cell, cap_s) and not options.again:
                continue
            checkpoint_of(cell.task, options.cache)
            place = Path(folder) / str(number)
            place.mkdir()
            before = machine()
            values = run_cell(cell, options.cache, place, cap_s, options.trl_python).as_row()
            results.add(cell, {"cap_s": cap_s, "machine": before, **values})
            print(f"{cell}: hit after {values['hit_wall_s']} s, {values['hit_cpu_s']} CPU s; {values['rollouts']} rollouts"
                  f" in {values['end_wall_s']} s", flush=True)  # fmt: skip
        if not options.quick and results.rows():
            draw(results.rows(), options.docs / "race.png")
            if (document := options.docs / "race.md").is_file():
                put_into(document, "hits", table(results.rows()))
        rows = [row for row in results.rows() if row["task"] in options.tasks]
        print(table(rows))
        report_facts("race", **ratios(rows), cap_s=cap_s, seeds=num_seeds, cores=cores)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, TRL at its best setting, no results are kept")
    parser.add_argument("--tasks", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--arms", nargs="+", choices=ARMS, help="fewer sides than all")
    parser.add_argument("--seeds", type=int, help="1 to so many (3)")
    parser.add_argument("--cap", type=float, help=f"seconds after which a run is cut off ({CAP_S:g})")
    parser.add_argument("--again", action="store_true", help="measure runs that are there already, too")
    parser.add_argument("--results", type=Path, default=ROOT / "docs" / "race.jsonl", help="the file of finished runs")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="where race.md and its picture are")
    parser.add_argument("--cache", type=Path, default=ROOT / "runs" / "race", help="where the checkpoints are kept")
    parser.add_argument("--trl-python", type=Path, default=TRL_PYTHON, help="the interpreter of TRL's environment")
    return parser.parse_args()


if __name__ == "__main__":
    main()
