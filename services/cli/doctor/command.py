"""``millrace doctor``: reads the metrics of a run and tells the verdict."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from services.cli.console.plain import say
from services.cli.doctor.diagnosis import diagnose
from services.cli.doctor.findings import Learning, Verdict
from services.cli.doctor.windows import LEAST_POINTS
from services.cli.inspect.rows import read_metrics
from services.common.config.reading.loading import load_resolved

NOTHING_LEARNED_EXIT = 3
"""Exit code of ``millrace run`` with ``run.fail_when_nothing_learned``."""


def examine(run_dir: Path) -> Verdict:
    """The verdict on a run, from its directory; raises ``ConfigError`` when it has no metrics."""
    return diagnose(read_metrics(run_dir), load_resolved(run_dir))


def tell(verdict: Verdict, console: Console) -> None:
    """Print whether each policy has learned, and each finding with its evidence and remedy."""
    for learning in verdict.learning:
        say(console, _learning(learning), "green" if learning.learned else "bold yellow")
    for finding in verdict.findings:
        say(console, f"{finding.policy}: {finding.failure}", "bold red")
        say(console, f"  seen: {finding.evidence}")
        say(console, f"  try:  {finding.remedy}")


def as_object(verdict: Verdict) -> dict[str, Any]:
    """The verdict as plain JSON."""
    return {
        "nothing_learned": verdict.nothing_learned,
        "learning": [{**asdict(one), "learned": one.learned} for one in verdict.learning],
        "findings": [{**asdict(one), "failure": one.failure.name.lower()} for one in verdict.findings],
    }


def _learning(learning: Learning) -> str:
    if learning.change is None:
        return f"{learning.policy}: no verdict: {learning.num_steps} training steps, and it takes {LEAST_POINTS} to tell a change from noise"
    verb = "learned" if learning.learned else "has not learned"
    return f"{learning.policy} {verb}: reward of {learning.measured} {learning.change}"
