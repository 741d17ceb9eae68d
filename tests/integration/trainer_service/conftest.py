"""A model on disk, an orchestrator for trainers, trainers in this process and trainers as processes."""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from services.cli.run.processes import ForkServer
from services.common.errors import RollmillError
from services.common.system.child import module_command
from services.common.system.processes import ChildProcess
from tests.integration.trainer_service.orchestrating import FakeOrchestrator
from tests.unit.trainer_service.building import POLICY, recipe, save_model
from tests.waiting import WAIT_S

EXIT_S = 240.0  # whole trainings of two ranks, which import torch first

MakeOrchestrator = Callable[..., Awaitable[FakeOrchestrator]]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "tiny", seed=1)


@pytest.fixture
async def make_orchestrator(tmp_path: Path, model: Path) -> AsyncIterator[MakeOrchestrator]:
    """Starts orchestrators and stops them; keywords are those of ``building.recipe``."""
    made: list[FakeOrchestrator] = []
    run_id = f"test-{uuid.uuid4().hex[:12]}"  # of this test alone: its snapshots lie in a directory that all share

    async def make(path: Path = model, **sections: Any) -> FakeOrchestrator:
        sections["run"] = {"id": run_id} | sections.get("run", {})
        orchestrator = FakeOrchestrator(recipe(path, **sections), tmp_path / f"run{len(made)}")
        made.append(orchestrator)
        await orchestrator.serve()
        return orchestrator

    yield make
    for orchestrator in made:
        await orchestrator.stop_serving()


class TrainerProcess:
    """``python -m services.trainer``, to be killed and started again; forked."""

    def __init__(
        self,
        orchestrator: FakeOrchestrator,
        run_dir: Path,
        num_ranks: int = 1,
        policy: str = POLICY,
        launch: Sequence[str] = (),  # arguments of launch_ranks
        name: str = "trainer",
        *,
        forks: ForkServer,
    ) -> None:
        self.run_dir = run_dir
        self._forks = forks
        self.name = name
        module = ["services.trainer"]
        if num_ranks > 1 or launch:
            module = ["tests.forked_ranks", *(launch or [f"--num-ranks={num_ranks}"])]
        arguments = [f"--policy={policy}", f"--orchestrator={orchestrator.address}", f"--run-dir={run_dir}"]
        self._argv = module_command(*module, *arguments)
        self.process: ChildProcess | None = None
        run_dir.mkdir(parents=True, exist_ok=True)

    def start(self) -> None:
        self.process = self._forks.start(self._argv, {**os.environ, "OMP_NUM_THREADS": "1"}, self._log)
        assert self.process is not None, "the fork server has ended"

    @property
    def _log(self) -> Path:
        return self.run_dir / f"{self.name}.stderr.txt"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    async def wait(self) -> int:
        assert self.process is not None
        return await asyncio.to_thread(self.process.wait, EXIT_S)

    async def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        await self.wait()

    def terminate(self) -> None:
        assert self.process is not None
        self.process.terminate()

    @property
    def errors(self) -> str:
        return self._log.read_text()

    def events(self) -> list[str]:
        return [
            line for path in (self.run_dir / "logs").glob("trainer-*.jsonl") for line in path.read_text().splitlines()
        ]

    def close(self) -> None:
        if self.process is not None:
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # all have left
            self.process.wait(WAIT_S)


@pytest.fixture
def trainers(forks: ForkServer) -> Iterator[Callable[..., TrainerProcess]]:
    """Makes trainers, which are forked, and ends their processes."""
    made: list[TrainerProcess] = []

    def make(orchestrator: FakeOrchestrator, **settings: Any) -> TrainerProcess:
        run_dir = settings.pop("run_dir", orchestrator.run_dir)
        made.append(TrainerProcess(orchestrator, run_dir, forks=forks, **settings))
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()


def failure_of(task: asyncio.Task[Any]) -> RollmillError:
    error = task.exception()
    assert isinstance(error, RollmillError)
    return error
