"""Runs every script of this folder, one after another, and says at the end how long each took and which failed.

A script fails when it ends with another exit code than 0, takes longer than ``LIMIT_S``, or when its last line is not the
JSON object of ``_bench.py`` with the script's name, its cores and the machine's load. The others run all the same. Ends
with 1 when one failed.

    python benchmarks/_run_all.py [--quick, or other arguments for each script]
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIMIT_S = 3600.0  # of one script: with --quick they take a minute or two, and ten times that on a slow and busy machine
_REST_S = 10.0  # for the last of its output, which only a process that left its session could hold open
_KEYS = {"name", "cores", "load", "left_out"}


def scripts(folder: Path = HERE) -> list[Path]:
    """Every script that measures; names of shared modules begin with an underscore."""
    return sorted(path for path in folder.glob("*.py") if not path.name.startswith("_"))


def run_all(paths: Iterable[Path], arguments: Sequence[str], limit_s: float = LIMIT_S) -> dict[str, str]:
    """Why each script failed, by its name; empty when all are well."""
    told, failures = [], {}
    for path in paths:
        print(f"== {path.name}", flush=True)
        began = time.monotonic()
        reason = _run(path, arguments, limit_s)
        told.append(f"{time.monotonic() - began:7.1f} s  {path.name}{f': {reason}' if reason else ''}")
        if reason:
            failures[path.stem] = reason
    print("\n".join(["==", *told, f"{len(failures)} of {len(told)} failed"]), flush=True)
    return failures


def _run(path: Path, arguments: Sequence[str], limit_s: float) -> str:
    """Why the script failed; empty on success. Its output is passed on line by line."""
    lines: list[str] = []
    with subprocess.Popen(
        [sys.executable, str(path), *arguments],
        cwd=HERE.parent,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")])),
        },
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        passing_on = threading.Thread(target=_pass_on, args=(process, lines), daemon=True)
        passing_on.start()
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:  # also by Ctrl-C: the session is its own, and all that is in it goes with it
            _kill(process)
        passing_on.join(_REST_S)
    if code is None:
        return f"not done after {limit_s:g} s"
    return f"exit code {code}" if code else _what_is_wrong(path.stem, lines)


def _pass_on(process: subprocess.Popen[str], lines: list[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line)


def _kill(process: subprocess.Popen[str]) -> None:
    """Also its remaining children."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def _what_is_wrong(name: str, lines: Sequence[str]) -> str:
    try:
        result = json.loads(lines[-1] if lines else "")
    except ValueError:
        return "its last line is no JSON"
    if not isinstance(result, dict) or not result.keys() >= _KEYS or result["name"] != name:
        return f"its last line is not the result of {name} with {', '.join(sorted(_KEYS))} (_report.py)"
    return ""


if __name__ == "__main__":
    sys.exit(bool(run_all(scripts(), sys.argv[1:])))
