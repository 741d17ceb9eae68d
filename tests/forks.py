"""A process that has imported the modules of all services: tests fork trainers and launchers there, which saves each five
CPU seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from services.cli.run.processes import MODULES, ForkServer

RANK_MODULES = ["torch.distributed.run", "services.trainer.ranks"]
LAUNCHER_MODULES = [
    "services.orchestrator.app",
    "services.envgateway.app",
    "services.cli.__main__",
    "services.cli.run.launch",
    "matplotlib.pyplot",
]


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """One for all tests of a worker. The process starts to import at once, and answers at the end."""
    server = ForkServer(tmp_path_factory.mktemp("forks") / "stderr", [*MODULES, *RANK_MODULES, *LAUNCHER_MODULES])
    yield server
    server.stop()
