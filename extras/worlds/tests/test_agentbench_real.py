"""Our environment at the servers of the real AgentBench, from a checkout of its repository, as processes beside ours.

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
import pytest

from extras.worlds.agentbench import AgentBenchWorld
from extras.worlds.tests.kept_games import unpack
from services.common.config.envgateway import AgentBenchConfig
from services.common.errors import InvalidRequestError
from tests import needs
from tests.integration.envgateway.environments.serving import Client, served_world
from tests.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.needs("alfworld", "AgentBench", "made ALFWorld games")]

TASK = "alfworld-made"


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
        "concurrency": 2,
        "data_path": str(data),
        "config_path": str(tasks / "configs/base_config.yaml"),
        "prompts_path": str(tasks / "prompts/alfworld_multiturn_plan_first.json"),
        "split": "made",
        "max_step": 35,
    }
    config = {
        TASK: {"module": "src.server.tasks.alfworld.ALFWorld", "parameters": parameters},
    }
    (folder / "tasks.yaml").write_text(json.dumps(config))  # JSON is YAML
    return Checkout(Path(root), python, folder, data)


@asynccontextmanager
async def program(bench: Checkout, module: str, *arguments: str) -> AsyncIterator[subprocess.Popen[bytes]]:
    """``python -m module``, killed with its descendants."""
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


@pytest.fixture(scope="module")
def games(data_root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], list[dict[str, Any]]]:
    """ALFWorld's tree, its games, and the expert's recorded episodes in the same order."""
    rows = data_root / "alfworld_made"
    folder = tmp_path_factory.mktemp("games")
    names = unpack(rows, folder)
    recorded = [json.loads(line) for line in (rows / "traces.jsonl").read_text(encoding="utf-8").splitlines()]
    by_game = {trace["game"]: trace for trace in recorded if trace["kind"] == "expert"}
    return folder, names, [by_game[name] for name in names]


@pytest.fixture
def bench(games: Any, tmp_path: Path) -> Checkout:
    folder, names, _ = games
    return checkout(tmp_path, folder, names)


async def play(client: Client, index: int, trace: dict[str, Any]) -> None:
    """The expert's actions give the recorded observations, and win."""
    episode = await client.create("bench", {"index": index})
    assert trace["intro"].split("\n\n")[-1] in episode.observation
    for turn, step in enumerate(trace["steps"], start=1):
        result = await client.step(episode.episode_id, turn, f"THOUGHT: as recorded\nACTION: {step['action']}")
        assert (result.reward, result.done) == (float(step["reward"]), step["done"])
        if not result.done:
            offered = " AVAILABLE ACTIONS: " + "\n".join(step["admissible"])
            assert result.observation.strip() == step["observation"].strip() + offered
    await client.close(episode.episode_id)


async def test_the_experts_episodes_are_won_at_the_classic_controller(bench: Checkout, games: Any) -> None:
    traces = games[2]
    async with controller(bench) as (url, _):
        world = AgentBenchWorld(AgentBenchConfig(url=url))
        async with served_world("bench", world) as client:
            for index in (1, 4, 8):  # one by one: its worker's engine is not thread-safe
                await play(client, index, traces[index])
            with pytest.raises(InvalidRequestError, match="has no sample"):
                await client.create("bench", {"index": 99})


async def test_the_experts_episodes_are_won_at_the_adapter(bench: Checkout, games: Any) -> None:
    if not bench.has("src.server.task_server_adapter"):
        needs.unmet("AgentBench", "this checkout has no task-server adapter")
    traces = games[2]
    async with adapter(bench) as url:
        world = AgentBenchWorld(AgentBenchConfig(url=url))
        async with served_world("bench", world) as client:
            for index in (1, 4, 8):
                await play(client, index, traces[index])
            with pytest.raises(InvalidRequestError, match="not found"):
                await client.create("bench", {"index": 99})
            episode = await client.create("bench", {"index": 4})
            same = [await client.step(episode.episode_id, turn, "ACTION: look") for turn in range(1, 5)]
            assert [(result.done, result.reward) for result in same] == [(False, 0.0)] * 3 + [(True, 0.0)]
            episode = await client.create("bench", {"index": 4})
            assert await health(url) == 1
            await client.close(episode.episode_id)
            assert await health(url) == 0


async def health(url: str) -> int:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/health") as response:
        return int((await response.json())["active_episodes"])
