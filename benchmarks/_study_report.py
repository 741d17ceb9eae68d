"""The tables and pictures of the study, from the rows of its result file. Pure but for writing the files."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.cli.console import pyplot
from services.cli.inspect.plot import STYLE

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
