"""Whole runs: ``rollmill run`` on a cut-down quickstart, real processes, real gRPC."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from services.cli.run.processes import ForkServer
from services.common.config.loading import load_recipe
from services.common.config.recipe import warm_start_dir
from services.common.security.keys import VARIABLE
from services.common.system.child import module_command
from services.orchestrator.journal import entries
from services.orchestrator.journal.entries import plain_trajectory
from services.orchestrator.journal.reader import JournalReader
from services.trainer.warm_start import make_starting_checkpoint
from tests.integration.trainer.launching import made_once
from tests.recipe_runs import rows

REPOSITORY = Path(__file__).resolve().parents[2]
RECIPE = REPOSITORY / "recipes" / "quickstart"
RUN_TIMEOUT_S = 240.0

# The quickstart's own recipe, made small: what is tested is the ring, not the learning.
WARM_START = ["warm_start.model0.steps=12", "warm_start.model0.batch_size=64"]
SMALL = [
    "policies.model0.batch.size=32",
    "policies.model0.batch.dynamic_sampling=false",
    "policies.model0.trainer.checkpoint_every=2",
    "inference.a.num_slots=32",
    "run.until=null",
    "evaluation.at_start=false",
    "evaluation.every=0",
    "evaluation.at_end=false",
    "orchestrator.retention=all",  # tests read every trajectory back, also those from before a kill
]


@pytest.fixture(scope="session")
def started_from(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Settings of a run that begins with a starting checkpoint made before, once for all runs, instead of its own."""

    def make(directory: Path) -> None:
        make_starting_checkpoint(load_recipe(RECIPE, WARM_START, {}), "model0", directory)

    made = warm_start_dir(made_once(tmp_path_factory, "warm_start", make), "model0")
    return ["warm_start={}", f"policies.model0.model.path={made}"]


class Run:
    """One ``rollmill run`` in a process of its own, forked with its imports done."""

    def __init__(
        self, forks: ForkServer, directory: Path, name: str, *settings: str, resume: str | None = None
    ) -> None:
        """``resume``: as of ``--resume``, for a run whose name is not given."""
        self.directory = directory / name
        sets = [f"run.dir={directory}", *([] if resume else [f"run.id={name}"]), *SMALL, *settings]
        arguments = [part for setting in sets for part in ("--set", setting)]
        self._output = directory / f"{name}.out"
        arguments += ["--resume", resume] if resume else ["--json"]
        command = module_command("tests.forked_launch", "run", str(RECIPE), *arguments)
        process = forks.start(command, {**os.environ, "OMP_NUM_THREADS": "1"}, self._output)
        assert process is not None, "the fork server has ended"
        self.process = process

    @property
    def output(self) -> str:
        return self._output.read_text()

    def rows(self, kind: str) -> list[dict[str, Any]]:
        return rows(self.directory, kind)

    def steps(self) -> int:
        return max((row["step"] for row in self.rows("training_step")), default=0)

    def wait_for(self, condition: Callable[[], object], what: str, timeout_s: float = RUN_TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"the run ended before {what}:\n{self.output}"
            assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s} s:\n{self.output}"
            time.sleep(0.05)

    def kill(self, process: str, how: signal.Signals = signal.SIGKILL) -> None:
        """kill -9 one of the run's processes, or send it another signal."""
        pids: dict[str, int] = json.loads((self.directory / "pids.json").read_text())
        os.kill(pids[process], how)

    def finish(self) -> dict[str, Any]:
        """Wait for the end and return the object on the last line of the standard output, which is among messages here."""
        code = self.process.wait(RUN_TIMEOUT_S)
        assert code == 0, self.output
        result: dict[str, Any] = json.loads([line for line in self.output.splitlines() if line.startswith("{")][-1])
        return result

    def address_of(self, *path: str) -> str:
        section: Any = json.loads((self.directory / "recipe.json").read_text())
        for key in path:
            section = section[key]
        return f"127.0.0.1:{section['port']}"

    def records(self) -> list[dict[str, Any]]:
        """Every record of the journal, trajectories with lists of numbers."""
        with closing(JournalReader(self.directory / "journal")) as reader:
            found = [(row.kind, reader.load(row) or {}) for row in reader.rows()]
        return [plain_trajectory(record) if kind == entries.TRAJECTORY else record for kind, record in found]

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)


@pytest.fixture
def rollmill(forks: ForkServer, tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """A command in a process of its own, forked with its imports done: exit code and output."""
    outputs = (tmp_path / f"command-{number}.out" for number in itertools.count())

    def run(*arguments: object, keys: Path | None = None) -> tuple[int, str]:
        output = next(outputs)
        environment = {**os.environ, VARIABLE: str(keys or "")}
        process = forks.start(module_command("tests.forked_launch", *map(str, arguments)), environment, output)
        assert process is not None, "the fork server has ended"
        return process.wait(RUN_TIMEOUT_S), output.read_text()

    return run


@pytest.fixture
def start_run(forks: ForkServer, tmp_path: Path, started_from: list[str]) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start(name: str, *settings: str, resume: str | None = None) -> Run:
        runs.append(Run(forks, tmp_path, name, *started_from, *settings, resume=resume))
        return runs[-1]

    yield start
    for run in runs:
        run.stop()
