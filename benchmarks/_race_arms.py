"""The sides of the race and how one run of each is made: settings, command, and the resulting chunks.

A run of Rollmill is the ``rollmill`` command on the recipe of the task, from a checkpoint that both sides share,
without evaluations; its rollouts are read from the journal. A run of TRL is ``_race_trl.py`` in an environment of its
own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks._process_tree import CpuCurve, Sampler
from benchmarks._race_curves import GOAL, WINDOW, Chunk, chunked, hit
from services.common.config.loading import load_recipe
from services.common.config.recipe import Recipe
from services.common.importing import load_object
from services.orchestrator.journal import entries
from services.orchestrator.journal.reader import JournalReader
from services.trainer.warm_start import make_starting_checkpoint

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
        since = self._number
        rows = self._reader.select(
            "r.number > ? AND r.kind = ?",
            (since, entries.TRAJECTORY),
            lambda row: row.number > since and row.kind == entries.TRAJECTORY,
        )
        for row in rows:
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
