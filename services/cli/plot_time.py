"""Where the time of every component of a run went: one bar each, of shares that sum to 1, from its metrics."""

from __future__ import annotations

from pathlib import Path

from services.cli import drawing
from services.cli.rows import read_metrics

MOST = 15  # activities with a colour of their own; the rest is grey


def plot_time(run_dir: Path, output: Path) -> Path | None:
    """Draw the last accounts of a run into a PNG; returns its path, or None when there are none."""
    rows = [row for row in read_metrics(run_dir) if row["kind"] in ("accounts", "summary")]
    shares: dict[str, dict[str, float]] = {}
    for row in rows:
        shares = row.get("shares") or row.get("time") or shares
    # A replica's records and weights are beside what its slots do.
    shares = {name: of_one for name, of_one in shares.items() if "/records" not in name and "/weights/" not in name}
    if not shares:
        return None
    totals: dict[str, float] = {}
    for of_one in shares.values():
        for activity, share in of_one.items():
            totals[activity] = totals.get(activity, 0.0) + share
    named = sorted(totals, key=lambda activity: -totals[activity])[:MOST]
    pyplot = drawing.pyplot()
    figure, ax = pyplot.subplots(figsize=(12, 1.2 + 0.45 * len(shares)), layout="constrained")
    components = sorted(shares, reverse=True)
    left = [0.0] * len(components)
    for number, activity in enumerate([*named, "other"]):
        widths = [
            shares[c].get(activity, 0.0)
            if activity != "other"
            else max(0.0, 1.0 - sum(shares[c].get(n, 0.0) for n in named))
            for c in components
        ]
        if any(width > 0.001 for width in widths):
            ax.barh(components, widths, left=left, color="0.8" if activity == "other" else f"C{number % 10}",
                    hatch="//" if number >= 10 and activity != "other" else None, label=activity)  # fmt: skip
            left = [begin + width for begin, width in zip(left, widths, strict=True)]
    ax.set_xlim(0, 1)
    ax.set_xlabel("share of its time; an arrow points at the component that it waits for")
    ax.set_title(f"{run_dir.name}: where the time went")
    ax.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    figure.savefig(output, dpi=110)
    pyplot.close(figure)
    return output
