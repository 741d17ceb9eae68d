"""A run that is started by the numbered scripts, one process each, in an unusual order."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import REPOSITORY, RUN_TIMEOUT_S, SMALL
from tests.ports import free_port
from tests.waiting import WAIT_S

pytestmark = pytest.mark.slow

SETTINGS = [*SMALL, "run.steps=2"]
WEBSHOP = "recipes/webshop/qwen2.5-7b-instruct-m2po-delta"
VARIABLES = ("ORCHESTRATOR_PORT", "ENVGATEWAY_PORT")  # all others may be free ones: their owners tell them


class Scripts:
    """Processes started by scripts of deploy/launch, all with the same settings and variables."""

    def __init__(self, directory: Path, started_from: list[str]) -> None:
        self._started_from = started_from
        ports = {variable: str(free_port()) for variable in VARIABLES}
        self.run_dir = directory / "split"
        self._directory = directory
        self._environment = {**os.environ, **ports, "PYTHON": sys.executable, "RUN_DIR": str(self.run_dir)}
        self._environment |= {"OMP_NUM_THREADS": "1"}
        self._environment.pop("TASK_SERVER_PORT", None)
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, script: str, recipe: str = "recipes/quickstart", *arguments: str, **variables: str) -> None:
        """Without arguments with ``SETTINGS`` and those that the run is started from."""
        settings = [part for setting in (*SETTINGS, *self._started_from) for part in ("--set", setting)]
        with (self._directory / f"{script}.out").open("ab") as output:
            self.running[script] = subprocess.Popen(
                [str(REPOSITORY / "deploy" / "launch" / script), recipe, *(arguments or settings)],
                cwd=REPOSITORY,
                env=self._environment | variables,
                stdout=output,
                stderr=output,
            )

    def output(self, script: str) -> str:
        return (self._directory / f"{script}.out").read_text()

    def wait_for(self, file: Path) -> None:
        deadline = time.monotonic() + RUN_TIMEOUT_S
        while not file.exists():
            assert time.monotonic() < deadline, f"no {file}"
            time.sleep(0.1)

    def stop(self) -> None:
        for process in self.running.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.running.values():
            process.wait(60)


@pytest.fixture
def scripts(tmp_path: Path, started_from: list[str]) -> Iterator[Scripts]:
    made = Scripts(tmp_path, started_from)
    yield made
    made.stop()


def test_a_run_is_started_by_its_scripts_and_goes_on_when_one_is_started_again(scripts: Scripts) -> None:
    for script in ("3_trainer_model0.sh", "1_inference_a.sh", "2_orchestrator.sh", "0_environment.sh"):
        scripts.start(script)
    scripts.wait_for(scripts.run_dir / "journal")
    scripts.running["2_orchestrator.sh"].kill()
    scripts.running["2_orchestrator.sh"].wait(WAIT_S)
    scripts.start("2_orchestrator.sh")
    for script in ("2_orchestrator.sh", "3_trainer_model0.sh", "1_inference_a.sh", "0_environment.sh"):
        assert scripts.running[script].wait(RUN_TIMEOUT_S) == 0, scripts.output(script)
    assert "the run has finished" in scripts.output("0_environment.sh"), "it was told, and left"
    summary = json.loads((scripts.run_dir / "summary.json").read_text())
    assert (summary["state"], summary["steps"]) == ("finished", {"model0": 2})
    assert "going on with the run in" in scripts.output("2_orchestrator.sh")
    assert "waiting for the orchestrator at" in scripts.output("1_inference_a.sh")
    assert (scripts.run_dir / "export" / "model0" / "model.safetensors").is_file()


def test_environments_are_served_alone_in_the_tiny_profile_until_they_are_stopped(
    scripts: Scripts, tmp_path: Path
) -> None:
    port = free_port()
    script, settings = "0_environment.sh", ("--profile", "tiny", "--set", f"run.dir={tmp_path}")
    scripts.start(script, WEBSHOP, *settings, TASK_SERVER_PORT=str(port), ROLLMILL_DATA_ROOT="")
    served = scripts.running[script]
    deadline = time.monotonic() + RUN_TIMEOUT_S
    while (info := task_info("webshop", port)) is None:
        assert served.poll() is None, scripts.output(script)
        assert time.monotonic() < deadline, scripts.output(script)
        time.sleep(0.2)
    assert "num_samples" in info
    assert not (scripts.run_dir / "recipe.json").exists(), "it is no run"
    served.send_signal(signal.SIGTERM)
    assert served.wait(60) == 0, scripts.output(script)


def task_info(task: str, port: int) -> dict[str, Any] | None:
    """What the task server says of a task; None without an answer."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/{task}/task/info", timeout=WAIT_S) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except (urllib.error.URLError, ConnectionError):
        return None
