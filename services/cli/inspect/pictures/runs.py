"""``rollmill plot``: plots one run, or several on one picture.

Reads ``metrics/orchestrator.jsonl`` of each run directory, during the run or later. Runs that differ in the seed alone are
one curve with a band. For a single run it also plots where the time went and the fates of rollouts, from the journal.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from services.cli.console import pyplot as load_pyplot
from services.cli.inspect.fate.picture import draw_fates
from services.cli.inspect.fate.reading import Fates, read_fates
from services.cli.inspect.pictures.panels import draw_panels
from services.cli.inspect.pictures.seeds import grouped
from services.cli.inspect.pictures.time import draw_time, newest_shares
from services.cli.inspect.run_state import training_steps
from services.common import run_files

COLUMNS, ROWS = 4, 3
_STYLE: dict[str, Any] = {
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "lines.linewidth": 1.6,
}


def plot_runs(run_dirs: Sequence[Path], output: Path) -> Path | None:
    """Draw the runs into a PNG; returns its path, or None when no run has finished a training step."""
    groups = grouped(run_dirs)
    if not any(training_steps(rows) for group in groups for rows in group.rows):
        return None
    fates = _fates(run_dirs)
    shares = newest_shares(groups[0].rows[0]) if len(run_dirs) == 1 else {}
    heights = [
        8.4,
        *([0.9 + 0.44 * len(shares)] if shares else []),
        *[3.2] * (0 if fates is None else len(fates.policies)),
    ]
    pyplot = load_pyplot()
    with pyplot.rc_context(_STYLE):
        figure = pyplot.figure(figsize=(16, sum(heights)), layout="constrained")
        # Grids of their own: the legends of fates are next to their bars, and would move the columns above apart.
        above, *below = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False).ravel()
        draw_panels(above.subplots(ROWS, COLUMNS), groups)
        if shares:
            draw_time(below.pop(0).subplots(), shares, "where the time went")
        if fates is not None:
            draw_fates([part.subplots(1, 2, width_ratios=[2.4, 1.0]) for part in below], fates)
        above.suptitle(", ".join(group.label for group in groups), fontsize=12)
        output.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(output, dpi=100)
        pyplot.close(figure)
    return output


def _fates(run_dirs: Sequence[Path]) -> Fates | None:
    """Of one run alone that has a journal; several would need a picture each."""
    if len(run_dirs) != 1 or not run_files.journal(run_dirs[0]).is_dir():
        return None
    return read_fates(run_dirs[0])
