"""A recipe that is launched again with ``--resume auto``: its run goes on, and one of two simultaneous launches gets
the run."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from services.common.config.loading import load_resolved
from tests.e2e.conftest import RUN_TIMEOUT_S, Run
from tests.waiting import WAIT_S

pytestmark = pytest.mark.slow


def run_directories(runs: Path) -> list[Path]:
    return sorted(resolved.parent for resolved in runs.glob("*/recipe.json"))


def listening_at(port: int) -> socket.socket:
    """Another program's listener at a port that the processes of a killed launcher leave soon."""
    deadline = time.monotonic() + RUN_TIMEOUT_S
    while True:
        try:
            return socket.create_server(("127.0.0.1", port))
        except OSError:
            assert time.monotonic() < deadline, f"port {port} is still in use"
            time.sleep(0.05)


def test_the_run_of_a_launcher_that_was_killed_goes_on_once(start_run: Callable[..., Run], tmp_path: Path) -> None:
    first = start_run("first", "run.steps=4", resume="auto")
    deadline = time.monotonic() + RUN_TIMEOUT_S
    while not any(b'"training_step"' in file.read_bytes() for file in tmp_path.glob("*/metrics/orchestrator.jsonl")):
        assert first.process.poll() is None and time.monotonic() < deadline, first.output
        time.sleep(0.1)
    os.kill(first.process.pid, signal.SIGKILL)
    first.process.wait(WAIT_S)
    assert "beginning a new run" in first.output
    (run_dir,) = run_directories(tmp_path)

    port = load_resolved(run_dir).orchestrator.port
    with listening_at(port):
        both = [start_run(name, "run.steps=4", resume="auto") for name in ("second", "third")]
        codes = [each.process.wait(RUN_TIMEOUT_S) for each in both]
    assert sorted(codes) == [0, 2], "\n".join(each.output for each in both)
    winner, loser = sorted(both, key=lambda each: each.process.wait(0))
    assert f"going on with {run_dir}" in winner.output
    assert f"orchestrator.port: another program has taken port {port}" in winner.output
    assert "is in use" in loser.output or "cannot continue" in loser.output
    assert run_directories(tmp_path) == [run_dir]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["state"], summary["steps"]) == ("finished", {"model0": 4})
