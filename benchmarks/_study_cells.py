"""The cells of the study: their settings, and the file of their results.

A cell is one training run: (part, arm, staleness, seed). Part ``losses`` is a controlled staleness per loss, part
``late`` the ring in virtual time per ``batch.late``. One JSON line per finished cell; a line counts only while the
digest of its settings is that of the cell, so that a changed setting is measured again. Shared by ``study.py`` and its
tests.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from benchmarks._virtual_player import POLICY
from benchmarks._virtual_ring import Pace, RingCurve, Tail, VirtualRing
from benchmarks._virtual_training import Curve, World, train_at_staleness
from services.common.config.loading import load_recipe
from services.common.config.recipe import Recipe
from services.trainer.metrics import StepMetrics
from services.trainer.warm_start import make_starting_checkpoint

ROOT = Path(__file__).resolve().parents[1]
# Part of design 1, and so of no digest: the quickstart's warm start has a schedule for another batch size.
_WARM_START_SCHEDULE = {"learning_rate": 3e-3, "betas": [0.9, 0.98], "warmup_share": 0.0}
DESIGN = 1  # of the harness: a change that moves the curves counts up, and every cell is measured again

# Every loss with the settings of its paper, or the default where the paper has none. All have GRPO's advantages.
LOSSES: dict[str, dict[str, Any]] = {
    "m2po": {"name": "m2po", "m2po_rule": "suffix", "m2po_threshold": 0.01},
    "m2po_authors": {
        "name": "m2po",
        "m2po_rule": "authors",
        "m2po_threshold": 0.04,
        "m2po_floor_low": 0.3,
        "m2po_floor_high": 0.5,
    },
    "ppo_clip": {"name": "ppo_clip", "eps_clip": 0.2},
    "decoupled_ppo": {"name": "decoupled_ppo", "eps_clip": 0.2, "importance_cap": 5.0},
    "gspo": {"name": "gspo", "eps_clip": 3e-4, "eps_clip_higher": 4e-4, "loss_aggregation": "sequence_mean"},
    "cispo": {"name": "cispo", "importance_cap": 5.0},
    "grpo": {"name": "grpo", "eps_clip": 0.2, "loss_aggregation": "sequence_mean"},
}
# The quickstart's model made smaller: a step of 64 sequences takes an eighth of a second of one core.
MODEL = (
    ("hidden_size", 64),
    ("num_layers", 2),
    ("num_heads", 4),
    ("num_kv_heads", 2),
    ("head_dim", 16),
    ("intermediate_size", 192),
)
LATE_MODES = ("keep", "mask", "wait", "drop")
LATE_LOSS = "m2po"  # of part ``late``: the default of the recipes


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """The settings that all cells share."""

    steps: int = 48
    batch_size: int = 64
    minibatches: int = 1  # then what a batch is trained on is off-policy by its staleness alone
    learning_rate: float = 1e-3
    model: tuple[tuple[str, int], ...] = MODEL
    warm_start_steps: int = 400
    warm_start_batch: int = 192
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    losses: tuple[str, ...] = tuple(LOSSES)
    staleness: tuple[int, ...] = (0, 2, 8, 32)
    late_modes: tuple[str, ...] = LATE_MODES
    late_staleness: tuple[int, ...] = (2, 8)
    tail: Tail = field(default_factory=Tail)
    pace: Pace = field(default_factory=Pace)

    def cells(self, parts: Seq[str]) -> Iterator[Cell]:
        """Seeds outermost: the finished cells always form a whole design with fewer seeds."""
        for seed in self.seeds:
            if "losses" in parts:
                for staleness in self.staleness:
                    yield from (Cell("losses", arm, staleness, seed) for arm in self.losses)
            if "late" in parts:
                for staleness in self.late_staleness:
                    yield from (Cell("late", mode, staleness, seed) for mode in self.late_modes)

    def settings(self, cell: Cell) -> dict[str, Any]:
        """Everything that the cell's result depends on, as overrides of ``recipes/quickstart`` and of the harness."""
        is_late = cell.part == "late"
        algorithm = LOSSES[LATE_LOSS if is_late else cell.arm]
        batch = {"size": self.batch_size, "minibatches": self.minibatches, "max_staleness": cell.staleness}
        overrides = {
            "run.seed": 0,  # of the starting checkpoint, which all cells share
            "run.steps": self.steps,
            f"policies.{POLICY}.algorithm": algorithm,
            f"policies.{POLICY}.batch": {**batch, "dynamic_sampling": False, **({"late": cell.arm} if is_late else {})},
            f"policies.{POLICY}.optimizer": {"lr": self.learning_rate, "betas": [0.9, 0.95], "schedule": "constant"},
            f"policies.{POLICY}.trainer.token_budget": 8192,
            f"warm_start.{POLICY}.builder_settings": dict(self.model),
            f"warm_start.{POLICY}.steps": self.warm_start_steps,
            f"warm_start.{POLICY}.batch_size": self.warm_start_batch,
        }
        harness = {"tail": asdict(self.tail), "pace": asdict(self.pace)} if is_late else {}
        return {"design": DESIGN, "overrides": overrides, **harness}


@dataclass(frozen=True, slots=True)
class Cell:
    """One training run of the study."""

    part: str  # losses or late
    arm: str  # a name of LOSSES, or a late mode
    staleness: int
    seed: int

    def __str__(self) -> str:
        return f"{self.part} {self.arm} staleness {self.staleness} seed {self.seed}"


def digest_of(settings: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=8).hexdigest()


class Results:
    """The lines of a file, by cell. An incomplete last line is ignored."""

    def __init__(self, path: Path, study: Study) -> None:
        self._path = path
        self._study = study
        self._rows: dict[Cell, dict[str, Any]] = {}
        self.num_stale = 0  # lines of other settings
        text = path.read_text() if path.is_file() else ""
        self._torn = bool(text) and not text.endswith("\n")
        for line in text.splitlines():
            self._read(line)

    def _read(self, line: str) -> None:
        try:
            row = json.loads(line)
        except ValueError:
            return
        cell = Cell(row["part"], row["arm"], row["staleness"], row["seed"])
        if row["settings"] != self._digest(cell):
            self.num_stale += 1
            return
        self._rows[cell] = row

    def _digest(self, cell: Cell) -> str | None:
        known = LOSSES if cell.part == "losses" else LATE_MODES
        return digest_of(self._study.settings(cell)) if cell.arm in known else None

    def __contains__(self, cell: Cell) -> bool:
        return cell in self._rows

    def rows(self, part: str) -> list[dict[str, Any]]:
        """The results of a part, for the cells of the study."""
        return [self._rows[cell] for cell in self._study.cells([part]) if cell in self._rows]

    def add(self, cell: Cell, values: Mapping[str, Any]) -> None:
        row = {**asdict(cell), "settings": self._digest(cell), **values}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(("\n" if self._torn else "") + json.dumps(row) + "\n")
        self._torn = False
        self._rows[cell] = row


def recipe_of(settings: Mapping[str, Any]) -> Recipe:
    schedule = {f"warm_start.{POLICY}.{key}": value for key, value in _WARM_START_SCHEDULE.items()}
    overrides = [
        f"{key}={yaml.safe_dump(value, default_flow_style=True)}"
        for key, value in {**schedule, **settings["overrides"]}.items()
    ]
    return load_recipe(ROOT / "recipes" / "quickstart", overrides, environment={})


def world_of(study: Study, cell: Cell, cache: Path) -> World:
    """The recipe of a cell and its starting checkpoint, made unless in ``cache``."""
    settings = study.settings(cell)
    recipe = recipe_of(settings)
    warm_start = {key: value for key, value in settings["overrides"].items() if key.startswith("warm_start")}
    return World(recipe, make_starting_checkpoint(recipe, POLICY, cache / digest_of(warm_start)))


def measure(study: Study, cell: Cell, cache: Path) -> dict[str, Any]:
    """Train one cell; ``cache`` keeps starting checkpoints between calls."""
    began = time.perf_counter()
    world = world_of(study, cell, cache)
    if cell.part == "losses":
        values = _of_curve(train_at_staleness(world, cell.staleness, cell.seed))
    else:
        values = _of_ring(VirtualRing(world, cell.seed, study.tail, study.pace).run())
    return {**values, "seconds": round(time.perf_counter() - began, 1)}


def _of_curve(curve: Curve) -> dict[str, Any]:
    return {
        "curve": _short(curve.sampled),
        "greedy": round(curve.final_greedy, 4),
        "sampled": round(curve.final_sampled, 4),
        "clipped": _mean([_clipped_share(step) for step in curve.steps]),
        "ess": _mean([step.algorithm.get("effective_sample_share") for step in curve.steps]),
        "gap": _mean([step.mismatch_abs for step in curve.steps]),
        "entropy": _short([step.entropy for step in curve.steps[-1:]])[0],
    }


def _clipped_share(step: StepMetrics) -> float | None:
    """Share of the trained tokens without a gradient because of the loss; for CISPO, with a truncated weight."""
    return step.algorithm.get("clipped_share", step.algorithm.get("truncated_share"))


def _of_ring(curve: RingCurve) -> dict[str, Any]:
    values = {key: value for key, value in asdict(curve).items() if key != "points"}
    names = ("version", "ticks", "reward_short", "reward_long")
    points = {name: [round(getattr(point, name), 4) for point in curve.points] for name in names}
    return {
        **values,
        "ages": list(curve.ages),
        "trainer_busy_share": round(curve.trainer_busy_share, 4),
        "points": points,
    }


def _short(values: Seq[float]) -> list[float]:
    return [round(value, 4) for value in values]


def _mean(values: Seq[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(sum(known) / len(known), 5) if known else None
