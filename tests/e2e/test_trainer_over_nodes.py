"""A run with a trainer rank on each of two nodes, both this machine: started by the commands that node 0 prints,
recovered without help."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.conftest import REPOSITORY, RUN_TIMEOUT_S, SMALL
from tests.ports import free_port

pytestmark = pytest.mark.slow


def test_a_run_with_a_trainer_over_two_nodes_survives_the_loss_of_a_rank(
    tmp_path: Path, started_from: list[str]
) -> None:
    (tmp_path / "bin").mkdir()
    ssh = tmp_path / "bin" / "ssh"
    ssh.write_text('#!/usr/bin/env bash\nshift\nexec bash -c "$*"\n')
    ssh.chmod(0o755)
    spread = ["nodes=[0, 1]", "num_ranks=2", "interface=lo", f"rendezvous_port={free_port()}", "checkpoint_every=1"]
    settings = [*SMALL, *started_from, "run.steps=3"]
    settings += [f"run.dir={tmp_path}", "run.id=two", *(f"policies.model0.trainer.{setting}" for setting in spread)]
    path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": path, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "services.cli", "run", str(REPOSITORY / "recipes" / "quickstart")]
    command += [part for setting in settings for part in ("--set", setting)]
    logs = {name: (tmp_path / f"{name}.out").open("w+") for name in ("node0", "node1")}
    started = {
        "node0": subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=logs["node0"], stderr=logs["node0"])
    }
    killed = False
    try:
        deadline = time.monotonic() + RUN_TIMEOUT_S
        while started["node0"].poll() is None:
            told = (tmp_path / "node0.out").read_text()
            assert time.monotonic() < deadline, words(tmp_path)
            assert "node1" not in started or started["node1"].poll() in (None, 0), words(tmp_path)
            if "node1" not in started and "trainer-model0-node1\n" in told:
                lines = [line.strip() for line in told.splitlines()]
                pasted = [line for line in lines if line.startswith(("mkdir -p", "ORCHESTRATOR_HOST_EXTERNAL="))]
                started["node1"] = subprocess.Popen(
                    ["bash", "-c", "\n".join(pasted)],
                    cwd=tmp_path, env=environment, stdout=logs["node1"], stderr=logs["node1"],
                )  # fmt: skip
            if not killed and (tmp_path / "two" / "checkpoints" / "model0" / "step_000001").exists():
                os.kill(rank_of_node_1(tmp_path), signal.SIGKILL)
                killed = True
            time.sleep(0.2)
        assert killed, words(tmp_path)
        assert [started[node].wait(60) for node in ("node0", "node1")] == [0, 0], words(tmp_path)
        summary = json.loads((tmp_path / "two" / "summary.json").read_text())
        assert (summary["state"], summary["steps"]) == ("finished", {"model0": 3})
    finally:
        for process in started.values():
            process.send_signal(signal.SIGTERM)
        for process in started.values():
            process.wait(60)
        for log in logs.values():
            log.close()


def rank_of_node_1(directory: Path) -> int:
    """The pid of the only rank with number 1 of a run in this directory."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
            arguments = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if (
            b"RANK=1" in environment
            and f"{directory}".encode() in b" ".join(environment)
            and b"services.trainer\0" in arguments
        ):
            return int(entry.name)
    raise AssertionError("rank 1 is not running")


def words(directory: Path) -> str:
    return "\n".join(f"--- {path}\n{path.read_text()[-4000:]}" for path in directory.glob("*.out"))
