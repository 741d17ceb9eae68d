"""Runs recipes as a user does, with ``rollmill run`` and every process real, and reads the results."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

ROOT = Path(__file__).parents[1]


def run_recipe(
    recipe: str, settings: Sequence[str], *options: str, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """The ended process of ``rollmill run RECIPE --json``, with each of ``settings`` after ``--set``.

    Raises AssertionError with the end of the output if the run fails.
    """
    changed = [part for setting in settings for part in ("--set", setting)]
    done = subprocess.run(
        [sys.executable, "-m", "services.cli", "run", recipe, "--json", *options, *changed],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done


def rows(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """The orchestrator's rows of metrics of one kind that are written so far."""
    path = run_dir / "metrics" / "orchestrator.jsonl"
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [row for line in lines if line.endswith(b"}") and (row := orjson.loads(line))["kind"] == kind]


def left_running(run_dir: Path) -> list[str]:
    """Command lines that still name the run's directory."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue  # it has ended
            if str(run_dir) in line:
                found.append(line)
    return found
