"""Draws the time of every component of a run as one bar of shares that sum to 1, from the metrics of the run.

Green is work, orange is a wait for another component, grey is idle time.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from services.cli.console import percent
from services.cli.console import pyplot as load_pyplot
from services.cli.inspect.run_state import Row, read_metrics
from services.common.telemetry.activities import ActivityName
from services.common.telemetry.components import is_records, is_weights
from services.common.telemetry.metrics import RowKind

LEAST_SHARE = 0.02  # of a segment of its own; smaller ones are one
_MOST_LINES = 3
_CHARACTERS = 170  # across the whole bar, at the size of the labels
_COLORS = {
    "work": ("#3a9b5c", "#5fb57c", "#86cba0"),
    "wait": ("#e58a3c", "#eda667", "#f3c193"),
    "idle": ("#cfcfcf", "#dedede"),
}
_WORK = (
    ActivityName.TRAINING, ActivityName.REPLAYING, ActivityName.PUBLISHING, ActivityName.CHECKPOINTING,
    ActivityName.EXPORTING, ActivityName.PREPARING_PAYLOAD, ActivityName.SENDING_WEIGHTS, ActivityName.RUNNING_WORKFLOW,
    ActivityName.GENERATING, ActivityName.SCORING, ActivityName.RUNNING_REWARD, ActivityName.FETCHING,
    ActivityName.VERIFYING, ActivityName.CHANGING_WEIGHTS, ActivityName.PLAYING_EPISODES, ActivityName.RUNNING_PROGRAMS,
    ActivityName.JUDGING_PROGRAMS, ActivityName.COMPUTING_REWARDS,
)  # fmt: skip
_IDLE = (
    ActivityName.IDLE, ActivityName.STARTING, ActivityName.PAUSED, ActivityName.FINISHED, ActivityName.NOT_ASKED,
    ActivityName.DRAINING, ActivityName.WAITING_FOR_CALLS, ActivityName.RUN_ENDED, ActivityName.NOTHING_TO_DO,
)  # fmt: skip

Shares = Mapping[str, Mapping[str, float]]


def plot_time(run_dir: Path, output: Path) -> Path | None:
    """Draw the last accounts of a run into a PNG; returns its path, or None when there are none."""
    shares = newest_shares(read_metrics(run_dir))
    if not shares:
        return None
    pyplot = load_pyplot()
    figure, ax = pyplot.subplots(figsize=(15, 1.2 + 0.5 * len(shares)), layout="constrained")
    draw_time(ax, shares, f"{run_dir.name}: where the time went")
    figure.savefig(output, dpi=100)
    pyplot.close(figure)
    return output


def newest_shares(rows: Iterable[Row]) -> Shares:
    """Component -> activity -> share of its time, of the newest accounts. A replica's records and weights have accounts of
    their own, parallel to its slots, and are left out."""
    shares: Shares = {}
    for row in rows:
        if row["kind"] in (RowKind.ACCOUNTS, RowKind.SUMMARY):
            shares = row.get("shares") or shares
    return {name: of_one for name, of_one in shares.items() if not is_records(name) and not is_weights(name)}


def draw_time(ax: Any, shares: Shares, title: str) -> None:
    """One bar for each component, work first, then waits by their cause."""
    for place, component in enumerate(sorted(shares, reverse=True)):
        left = 0.0
        for kind, activity, share in segments_of(shares[component]):
            shade = _COLORS[kind][place % len(_COLORS[kind])] if activity == _SMALL else _shade(kind, activity)
            ax.barh(place, share, left=left, height=0.82, color=shade, edgecolor="white", linewidth=1.2)
            ax.text(left + share / 2, place, _fitting(activity, share), ha="center", va="center", fontsize=6.5)
            left += share
    ax.set_yticks(range(len(shares)), sorted(shares, reverse=True), fontsize=8)
    ax.set_xlim(0, 1)
    ax.set_ylim(-0.5, len(shares) - 0.5)
    ax.xaxis.set_major_formatter(percent())
    ax.set_xlabel(
        "share of the component's time   (green: work; orange: waits for the component behind the arrow; grey: nothing to do)"
    )
    ax.set_title(title)
    ax.grid(False)


_SMALL = "other"


def kind_of(activity: str) -> str:
    """``work``, ``wait`` or ``idle``.

    >>> kind_of("generating -> engine/model0"), kind_of("waiting for reward -> envgateway"), kind_of("starting")
    ('work', 'wait', 'idle')
    """
    name = activity.partition(" -> ")[0]
    if name.startswith(_WORK):
        return "work"
    return "idle" if name in _IDLE else "wait"


def segments_of(shares: Mapping[str, float]) -> list[tuple[str, str, float]]:
    """(kind, activity, share), work first, larger ones first; small ones of a kind are one."""
    found: list[tuple[str, str, float]] = []
    for kind in _COLORS:
        of_kind = sorted(((s, a) for a, s in shares.items() if kind_of(a) == kind), reverse=True)
        found += [(kind, activity, share) for share, activity in of_kind if share >= LEAST_SHARE]
        small = sum(share for share, _ in of_kind if share < LEAST_SHARE)
        if small > 0.001:
            found.append((kind, _SMALL, small))
    return found


def _shade(kind: str, activity: str) -> str:
    """The same activity has the same shade in all bars."""
    return _COLORS[kind][sum(activity.encode()) % len(_COLORS[kind])]


def _fitting(activity: str, share: float) -> str:
    """As much of "43% waiting for rollouts → replica/a" as fits into the segment, on up to three lines."""
    room = int(share * _CHARACTERS)
    text = f"{share:.0%} {activity.replace(' -> ', ' → ')}"
    lines = textwrap.wrap(text, max(room, 1), break_long_words=False)
    if len(lines) <= _MOST_LINES and all(len(line) <= room for line in lines):
        return "\n".join(lines)
    return f"{share:.0%}" if room >= 4 else ""
