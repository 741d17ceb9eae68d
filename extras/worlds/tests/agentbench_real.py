"""The real AgentBench from a checkout of its repository, as processes beside ours. No part is in this tree.

ROLLMILL_AGENTBENCH_ROOT     the checkout: branch v0.2, or a fork that adds the task-server adapter
ROLLMILL_AGENTBENCH_PYTHON   an interpreter with its packages (pydantic 1.10, fastapi 0.101, uvicorn 0.22, aiohttp,
                             requests, pyyaml, jsonlines, networkx, tqdm, gym, nltk) and alfworld
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from tests import needs
from tests.ports import free_port

TASK = "alfworld-made"
RAISING_TASK = "raising"
CONCURRENCY = 2

_RAISING = """
from src.server.task import Task

class Raising(Task):
    def get_indices(self):
        return [0]
    async def start_sample(self, index, session):
        await session.action({"role": "user", "content": "say something"})
        raise ValueError("as always")
"""


@dataclass(frozen=True)
class Checkout:
    root: Path
    python: str
    folder: Path  # where its programs run
    data: Path  # ALFWorld's games

    def environment(self) -> dict[str, str]:
        # alfworld imports torch, which the text environment never uses: an empty module stands in for it.
        path = os.pathsep.join([str(self.folder / "stand_in"), str(self.root)])
        return {"PATH": os.environ["PATH"], "HOME": str(self.folder), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}

    def has(self, module: str) -> bool:
        return (self.root / (module.replace(".", "/") + ".py")).is_file()


def checkout(folder: Path, data: Path, games: Sequence[str]) -> Checkout:
    """Skips where there is none. Makes the task's files: its list of games and its config."""
    root, python = os.environ.get("ROLLMILL_AGENTBENCH_ROOT"), os.environ.get("ROLLMILL_AGENTBENCH_PYTHON")
    if not root or not python:
        needs.unmet("AgentBench", "ROLLMILL_AGENTBENCH_ROOT or ROLLMILL_AGENTBENCH_PYTHON is not set")
    import alfworld.info

    tasks = Path(root) / "src/server/tasks/alfworld"
    for name in ("stand_in", "data/alfworld"):
        (folder / name).mkdir(parents=True)
    (folder / "stand_in/torch.py").touch()
    (folder / "data/alfworld/made.json").write_text(json.dumps({"made": list(games)}))
    logic = data / "logic"
    logic.mkdir(exist_ok=True)
    for source in (alfworld.info.ALFRED_PDDL_PATH, alfworld.info.ALFRED_TWL2_PATH):
        (logic / Path(source).name).write_bytes(Path(source).read_bytes())
    parameters = {
        "name": TASK,
        "concurrency": CONCURRENCY,
        "data_path": str(data),
        "config_path": str(tasks / "configs/base_config.yaml"),
        "prompts_path": str(tasks / "prompts/alfworld_multiturn_plan_first.json"),
        "split": "made",
        "max_step": 35,
    }
    config = {
        TASK: {"module": "src.server.tasks.alfworld.ALFWorld", "parameters": parameters},
        RAISING_TASK: {"module": "raising.Raising", "parameters": {"name": RAISING_TASK, "concurrency": 1}},
    }
    (folder / "raising.py").write_text(_RAISING)
    (folder / "tasks.yaml").write_text(json.dumps(config))  # JSON is YAML
    return Checkout(Path(root), python, folder, data)


@asynccontextmanager
async def program(
    bench: Checkout, module: str, *arguments: str, asked_to_stop: bool = False
) -> AsyncIterator[subprocess.Popen[bytes]]:
    """``python -m module``, killed with its descendants; terminated first where some have groups of their own."""
    log = (bench.folder / f"{module}.log").open("wb")
    process = await asyncio.to_thread(
        lambda: subprocess.Popen(
            [bench.python, "-m", module, *arguments],
            cwd=bench.folder,
            env=bench.environment(),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    )
    try:
        yield process
    finally:
        if asked_to_stop:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, 30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        log.close()


@asynccontextmanager
async def controller(bench: Checkout, task: str = TASK) -> AsyncIterator[tuple[str, subprocess.Popen[bytes]]]:
    """The classic controller and one worker: the controller's URL, and the worker."""
    port, worker_port = free_port(), free_port()
    url, own = f"http://127.0.0.1:{port}/api", f"http://127.0.0.1:{worker_port}/api"
    worker_arguments = [task, "--config", "tasks.yaml", "--controller", url, "--self", own, "--port", str(worker_port)]
    async with program(bench, "src.server.task_controller", "--port", str(port)):
        await until(f"{url}/list_workers", lambda workers: True)
        async with program(bench, "src.server.task_worker", *worker_arguments) as worker:
            await until(f"{url}/list_workers", lambda workers: task in workers)
            yield url, worker


@asynccontextmanager
async def adapter(bench: Checkout) -> AsyncIterator[str]:
    """The URL of a task-server adapter."""
    port = free_port()
    arguments = [TASK, "--config", "tasks.yaml", "--port", str(port), "--host", "127.0.0.1", "--skip-container"]
    async with program(bench, "src.server.task_server_adapter", *arguments):
        url = f"http://127.0.0.1:{port}/api"
        await until(f"{url}/task/info", lambda info: info["num_samples"] > 0)
        yield url


@asynccontextmanager
async def pool(bench: Checkout) -> AsyncIterator[str]:
    """The URL of a pool of two adapters."""
    port = free_port()
    arguments = [TASK, "--config", "tasks.yaml", "--port", str(port), "--host", "127.0.0.1", "--num-adapters", "2"]
    async with program(bench, "src.server.adapter_pool_controller", *arguments, asked_to_stop=True):
        url = f"http://127.0.0.1:{port}/api"
        await until(f"{url}/health", lambda health: health["status"] == "healthy")
        yield url


async def until(url: str, condition: Any) -> Any:
    async with asyncio.timeout(90), aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(url) as response:
                    body = await response.json()
                    if response.status == 200 and condition(body):
                        return body
            except aiohttp.ClientError:
                pass  # it is still starting
            await asyncio.sleep(0.2)
