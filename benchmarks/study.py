"""Losses under stale data, and late rollouts by ``batch.late``: learning curves of a tiny model, seeds with intervals.

Part ``losses`` trains the quickstart's calculator with each loss on batches that are exactly 0, 2, 8 or 32 versions old
(``_virtual_ring.py``); part ``late`` runs the asynchronous ring in virtual time with long-tailed tool calls
(``_virtual_ring.py``). Finished cells are kept, so an interrupted study continues, and a changed setting is measured
again. ``docs/study.md`` has the results; its tables and pictures are written by this script.

    make study
    python benchmarks/study.py [--part losses | --part late] [--quick | --tune] [--results FILE] [--docs DIR]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import math
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import structlog
import transformers
import yaml

from benchmarks._bench import report_facts
from benchmarks._virtual_player import POLICY
from benchmarks._virtual_ring import Curve, Pace, RingCurve, Tail, VirtualRing, World, train_at_staleness
from services.cli.console import pyplot
from services.cli.inspect.plot import STYLE
from services.common.config.loading import load_recipe
from services.common.config.recipe import Recipe
from services.trainer.metrics import StepMetrics
from services.trainer.warm_start import make_starting_checkpoint

# --- The cells of the study: their settings, and the file of their results.


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


# --- The tables and pictures of the study, from the rows of its result file. Pure but for writing the files.


Row = dict[str, Any]
COLLAPSED_BELOW = 0.5  # of a run's own best: then what it had learned is gone
SMOOTHED = 5  # versions of a curve that are averaged before its best and its end are read off

# Two-sided 95% quantiles of Student's t by degrees of freedom.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over seeds and half of its 95% t interval; None with one seed."""

    mean: float
    half: float | None

    def __str__(self) -> str:
        return f"{self.mean:.2f}" if self.half is None else f"{self.mean:.2f} ± {self.half:.2f}"


def interval(values: Seq[float]) -> Interval:
    """Over independent runs.

    >>> str(interval([0.8, 0.9, 1.0]))
    '0.90 ± 0.25'
    """
    mean = statistics.fmean(values)
    if len(values) == 1:
        return Interval(mean, None)
    quantile = _T95[min(len(values) - 1, len(_T95)) - 1]
    return Interval(mean, quantile * statistics.stdev(values) / math.sqrt(len(values)))


def area(curve: Seq[float]) -> float:
    """Area under a curve over its length: the mean reward of all versions."""
    return statistics.fmean(curve)


def collapsed(curve: Seq[float]) -> bool:
    """Whether the end of a curve is below half of its best, both averaged over ``SMOOTHED`` versions."""
    smooth = [statistics.fmean(curve[i : i + SMOOTHED]) for i in range(max(1, len(curve) - SMOOTHED + 1))]
    return smooth[-1] < COLLAPSED_BELOW * max(smooth)


def by_cell(rows: Seq[Row]) -> dict[tuple[str, int], list[Row]]:
    """Rows of all seeds by (arm, staleness)."""
    found: dict[tuple[str, int], list[Row]] = defaultdict(list)
    for row in rows:
        found[row["arm"], row["staleness"]].append(row)
    return dict(found)


def ends_table(rows: Seq[Row]) -> str:
    """Markdown: sampled reward at the end, a line per loss and a column per staleness."""
    cells = by_cell(rows)
    arms, ages = _axes(cells)
    lines = [f"| loss | {' | '.join(f'staleness {s}' for s in ages)} |", "|---" * (len(ages) + 1) + "|"]
    for arm in arms:
        ends = [str(interval([r["sampled"] for r in cells[arm, s]])) if (arm, s) in cells else "–" for s in ages]
        lines.append(f"| `{arm}` | {' | '.join(ends)} |")
    return "\n".join(lines)


def _axes(cells: dict[tuple[str, int], list[Row]]) -> tuple[list[str], list[int]]:
    """Arms in the order in which they were measured, and every staleness."""
    return list(dict.fromkeys(arm for arm, _ in cells)), sorted({staleness for _, staleness in cells})


def losses_table(rows: Seq[Row]) -> str:
    """Markdown: a line per loss and staleness."""
    lines = [
        "| loss | staleness | seeds | greedy at the end | sampled at the end | mean of the curve | collapsed | clipped "
        "| ESS | mean abs(*l* − *b*) |",
        "|---" * 10 + "|",
    ]
    cells = by_cell(rows)
    arms, ages = _axes(cells)
    for arm, staleness in ((arm, s) for arm in arms for s in ages if (arm, s) in cells):
        found = cells[arm, staleness]
        lines.append(
            f"| `{arm}` | {staleness} | {len(found)} | {interval([r['greedy'] for r in found])} "
            f"| {interval([r['sampled'] for r in found])} | {interval([area(r['curve']) for r in found])} "
            f"| {sum(collapsed(r['curve']) for r in found)} of {len(found)} | {_share(found, 'clipped')} "
            f"| {_share(found, 'ess')} | {_number(found, 'gap')} |"
        )
    return "\n".join(lines)


def late_table(rows: Seq[Row]) -> str:
    """Markdown: a line per late mode and staleness."""
    lines = [
        "| `late` | staleness | seeds | reward, short tasks | reward, long tasks | mean of the long curve "
        "| long share of played | long share of trained | cancelled | trained of played | ticks | trainer busy | mean age | oldest |",
        "|---" * 14 + "|",
    ]
    for (mode, staleness), found in sorted(by_cell(rows).items(), key=lambda item: (item[0][1], item[0][0])):

        def each(value: Callable[[Row], float], found: list[Row] = found) -> Interval:
            return interval([value(row) for row in found])

        lines.append(
            f"| `{mode}` | {staleness} | {len(found)} | {each(lambda r: r['points']['reward_short'][-1])} "
            f"| {each(lambda r: r['points']['reward_long'][-1])} | {each(lambda r: area(r['points']['reward_long']))} "
            f"| {each(lambda r: r['num_long_played'] / r['num_played'])} "
            f"| {each(lambda r: r['num_long_trained'] / r['num_trained'])} "
            f"| {each(lambda r: r['num_cancelled'] / (r['num_played'] + r['num_cancelled']))} "
            f"| {each(lambda r: r['num_trained'] / r['num_played'])} | {each(lambda r: r['ticks']).mean:,.0f} "
            f"| {each(lambda r: r['trainer_busy_share'])} | {each(_mean_age)} | {max(len(r['ages']) - 1 for r in found)} |"
        )
    return "\n".join(lines)


def _mean_age(row: Row) -> float:
    return sum(age * count for age, count in enumerate(row["ages"])) / sum(row["ages"])


def _share(rows: Seq[Row], key: str) -> str:
    values = [row[key] for row in rows if row.get(key) is not None]
    return f"{statistics.fmean(values):.1%}" if values else "–"


def _number(rows: Seq[Row], key: str) -> str:
    values = [row[key] for row in rows if row.get(key) is not None]
    return f"{statistics.fmean(values):.3f}" if values else "–"


def draw_losses(rows: Seq[Row], path: Path) -> None:
    """A panel per staleness with the mean curve of every loss, one with the end over staleness, and the legend."""
    cells = by_cell(rows)
    arms, ages = _axes(cells)
    plt = pyplot()
    with plt.rc_context(STYLE):
        lines = math.ceil((len(ages) + 2) / 3)
        figure, axes = plt.subplots(lines, 3, figsize=(14, 3.8 * lines), layout="constrained", squeeze=False)
        panels = list(axes.flat)
        for ax, staleness in zip(panels, ages, strict=False):
            for number, arm in enumerate(arms):
                if found := cells.get((arm, staleness)):
                    _band(ax, [_smooth(row["curve"]) for row in found], arm, f"C{number}")
            ax.set(title=f"staleness {staleness}", xlabel="version", ylabel="reward, sampled", ylim=(0, 1))
        last = panels[len(ages)]
        for number, arm in enumerate(arms):
            places = [i for i, staleness in enumerate(ages) if (arm, staleness) in cells]
            ends = [interval([row["sampled"] for row in cells[arm, ages[i]]]) for i in places]
            last.errorbar(
                [i + 0.06 * (number - len(arms) / 2) for i in places], [end.mean for end in ends],
                yerr=[end.half or 0.0 for end in ends], color=f"C{number}", label=arm, marker="o", markersize=4, capsize=2,
            )  # fmt: skip
        last.set(title="at the end", xlabel="staleness", ylabel="reward, held out, sampled", ylim=(0, 1))
        last.set_xticks(range(len(ages)), [str(staleness) for staleness in ages])
        for ax in panels[len(ages) + 1 :]:
            ax.axis("off")
        panels[len(ages) + 1].legend(*last.get_legend_handles_labels(), loc="center left", fontsize=11)
        _save(plt, figure, path)


def draw_late(rows: Seq[Row], path: Path) -> None:
    """Per staleness: reward on long and on short tasks over versions, and on long ones over ticks."""
    cells = by_cell(rows)
    modes, ages = _axes(cells)
    plt = pyplot()
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(len(ages), 3, figsize=(14, 3.8 * len(ages)), layout="constrained", squeeze=False)
        for line, staleness in zip(axes, ages, strict=True):
            for number, mode in enumerate(modes):
                found = [row["points"] for row in cells.get((mode, staleness), [])]
                if not found:
                    continue
                color = f"C{number}"
                _band(line[0], [p["reward_long"] for p in found], mode, color, found[0]["version"])
                _band(line[1], [p["reward_short"] for p in found], mode, color, found[0]["version"])
                ticks = [statistics.fmean(column) for column in zip(*(p["ticks"] for p in found), strict=True)]
                _band(line[2], [p["reward_long"] for p in found], mode, color, ticks)
            for ax, title in zip(line, ("long tasks", "short tasks", "long tasks, over time"), strict=True):
                ax.set(title=f"{title}, staleness {staleness}", xlabel="version", ylim=(0, 1))
            line[2].set_xlabel("ticks")
            line[0].set_ylabel("reward, held out")
            line[0].legend(fontsize=8)
        _save(plt, figure, path)


def _smooth(curve: Seq[float]) -> list[float]:
    """The mean of the last ``SMOOTHED`` versions, of fewer at the beginning."""
    return [statistics.fmean(curve[max(0, i + 1 - SMOOTHED) : i + 1]) for i in range(len(curve))]


def _band(ax: Any, curves: Seq[Seq[float]], label: str, color: str, x: Seq[float] | None = None) -> None:
    points = [interval(values) for values in zip(*curves, strict=True)]
    places = list(range(len(points))) if x is None else list(x)
    ax.plot(places, [p.mean for p in points], color=color, label=label)
    halves = [p.half or 0.0 for p in points]
    low = [p.mean - half for p, half in zip(points, halves, strict=True)]
    high = [p.mean + half for p, half in zip(points, halves, strict=True)]
    ax.fill_between(places, low, high, color=color, alpha=0.12, linewidth=0)


def _save(plt: Any, figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def put_into(document: Path, name: str, table: str) -> None:
    """Replace the text between ``<!-- NAME -->`` and ``<!-- end of NAME -->`` in a document.

    Raises:
        ValueError: the document has no such place.
    """
    text = document.read_text()
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"{document} has no place for {name}: write {begin.strip()} and {end} into it")
    document.write_text(f"{before}{begin}\n{table}\n\n{end}{after}")


# --- The benchmark itself.


PARTS = ("losses", "late")
RATES = (3e-4, 1e-3, 3e-3)  # of --tune
QUICK = Study(
    steps=6, batch_size=32, warm_start_steps=30, warm_start_batch=32, seeds=(0, 1), losses=("m2po", "grpo"),
    staleness=(2,), late_modes=("keep", "drop"), late_staleness=(2,), pace=Pace(num_slots=64, evaluate_every=6),
)  # fmt: skip


def run(study: Study, parts: Seq[str], results: Results, cache: Path) -> int:
    """Measure the missing cells; returns their number."""
    cells = list(study.cells(parts))
    missing = [cell for cell in cells if cell not in results]
    print(
        f"{len(cells) - len(missing)} of {len(cells)} cells are there, {results.num_stale} lines are of other settings"
    )
    for number, cell in enumerate(missing, start=1):
        began = time.perf_counter()
        results.add(cell, measure(study, cell, cache))
        print(f"[{number}/{len(missing)}] {cell}: {time.perf_counter() - began:.1f} s", flush=True)
    return len(missing)


def write_documents(results: Results, docs: Path) -> None:
    """Write tables into ``study.md``, and pictures into its folder."""
    losses, late = results.rows("losses"), results.rows("late")
    tables: dict[str, str] = {}
    if losses:
        draw_losses(losses, docs / "study-losses.png")
        tables |= {"ends": ends_table(losses), "losses": losses_table(losses)}
    if late:
        draw_late(late, docs / "study-late.png")
        tables["late"] = late_table(late)
    document = docs / "study.md"
    for name, table in tables.items():
        if document.is_file():
            put_into(document, name, table)


def tune(study: Study, cache: Path) -> dict[str, dict[str, Any]]:
    """The rule for the one learning rate of all cells: GRPO at staleness 0, the rate with the largest mean of the curve."""
    found: dict[str, dict[str, Any]] = {}
    for rate in RATES:
        rows = [
            measure(replace(study, learning_rate=rate), Cell("losses", "grpo", 0, seed), cache)
            for seed in study.seeds[:3]
        ]
        found[f"{rate:g}"] = {"area": str(interval([area(r["curve"]) for r in rows])),
                              "sampled": str(interval([r["sampled"] for r in rows]))}  # fmt: skip
        print(f"learning rate {rate:g}: {found[f'{rate:g}']}", flush=True)
    return found


def summary(rows: Seq[dict[str, Any]]) -> dict[str, Any]:
    """Sampled reward at the end by "arm/staleness", with its interval, and how many runs collapsed."""
    return {
        f"{arm}/{staleness}": {
            "sampled": interval([r["sampled"] for r in found]).mean,
            "half": interval([r["sampled"] for r in found]).half,
            "seeds": len(found),
            "collapsed": sum(collapsed(r["curve"]) for r in found),
        }
        for (arm, staleness), found in by_cell(rows).items()
    }


def late_summary(rows: Seq[dict[str, Any]]) -> dict[str, Any]:
    """Reward on long and on short tasks at the end by "mode/staleness"."""
    ends = ("reward_long", "reward_short")
    return {
        f"{mode}/{staleness}": {end: interval([r["points"][end][-1] for r in found]).mean for end in ends}
        for (mode, staleness), found in by_cell(rows).items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--quick", action="store_true", help="a few cells of a few steps, into a folder that is removed"
    )
    parser.add_argument("--tune", action="store_true", help="only compare learning rates for GRPO at staleness 0")
    parser.add_argument("--part", choices=PARTS, help="one of the two")
    parser.add_argument("--seeds", type=int, help="fewer seeds than the study's")
    parser.add_argument("--losses", nargs="+", choices=sorted(LOSSES), help="fewer losses than the study's")
    parser.add_argument(
        "--minibatches", type=int, help="optimizer updates per batch; name other --results and --docs too"
    )
    parser.add_argument(
        "--results", type=Path, default=ROOT / "docs" / "study.jsonl", help="the file of finished cells"
    )
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="where study.md and its pictures are")
    parser.add_argument(
        "--cache", type=Path, default=ROOT / "runs" / "study", help="where starting checkpoints are kept"
    )
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    parts = [options.part] if options.part else list(PARTS)
    study = QUICK if options.quick else Study()
    if options.seeds:
        study = replace(study, seeds=study.seeds[: options.seeds])
    if options.losses:
        study = replace(study, losses=tuple(options.losses))
    if options.minibatches:
        study = replace(study, minibatches=options.minibatches)
    if options.tune:
        report_facts("study", tuned=tune(study, options.cache), losses=list(LOSSES))
        return
    with tempfile.TemporaryDirectory() as folder:
        if options.quick:
            options.docs = options.cache = Path(folder)
            options.results = Path(folder) / "study.jsonl"
        results = Results(options.results, study)
        measured = run(study, parts, results, options.cache)
        write_documents(results, options.docs)
    missing = [str(cell) for cell in study.cells(parts) if cell not in results]
    report_facts(
        "study", measured=measured, losses=summary(results.rows("losses")), late=late_summary(results.rows("late")),
        left_out=dict.fromkeys(missing, "not measured"),
    )  # fmt: skip


if __name__ == "__main__":
    main()
