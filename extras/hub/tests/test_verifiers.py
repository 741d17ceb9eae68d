"""The workflow ``verifiers`` and its process: processes that end, hang or answer wrongly, and environments that fail.

The interpreter is a script of the test; the true package is played by ``tests/recipes/test_hubs.py``.
"""

from __future__ import annotations

import asyncio
import importlib.util
import re
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import extras.hub.verifiers.child
from extras.hub.verifiers import environment as environment_module
from extras.hub.verifiers.child.messages import Played
from extras.hub.verifiers.environment import EnvironmentFailedError, Verifiers, VerifiersEnvironment
from extras.hub.verifiers.tasks import PYTHON, interpreter
from services.common.config.data import DatasetConfig, WorkflowConfig
from services.common.config.loading import load_recipe
from services.common.errors import ConfigError, DatasetError, InfrastructureError
from services.inference.workflows.registry import build_workflow
from services.orchestrator.tasks.datasets import open_source
from tests.integration.inference.endpoint_peers import context_of, serving
from tests.running import is_running
from tests.unit.inference.fakes import make_task, served_policy
from tests.waiting import WAIT_S, until

ROOT = Path(__file__).resolve().parents[3]
OPENED = '{"opened": {"version": "0.4.0", "endless": false}}'
READ = "import json, os, sys\nfor line in sys.stdin:\n    asked = json.loads(line)\n"
OPEN = f"    if asked['ask'] == 'open':\n        print('{OPENED}', flush=True)\n"
PLAY = "    if asked['ask'] == 'play':\n        "


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes the program that takes the place of the environment's process."""

    def write(body: str) -> None:
        file = tmp_path / "python"
        file.write_text(f"#!{sys.executable}\n{body}")
        file.chmod(0o755)
        monkeypatch.setenv(PYTHON, str(file))

    return write


@pytest.fixture
async def environment() -> AsyncIterator[VerifiersEnvironment]:
    made = VerifiersEnvironment("wordle", {})
    yield made
    await made.close()


async def play(environment: VerifiersEnvironment) -> Played:
    return await environment.play({"idx": 0}, base_url="http://127.0.0.1:1/v1", session="s", model="default")


async def test_an_episode_has_the_reward_and_the_metrics_of_the_environment(
    script: Any, environment: VerifiersEnvironment
) -> None:
    played = "print(json.dumps({'id': asked['id'], 'played': {'reward': 0.5, 'metrics': {'turns': asked['task']['idx']}}}), flush=True)"
    script(READ + OPEN + PLAY + played)
    both = await asyncio.gather(play(environment), play(environment))
    assert list(both) == [Played(reward=0.5, metrics={"turns": 0})] * 2 and environment.num_starts == 1


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("import sys; print('no room', file=sys.stderr); sys.exit(3)", "exited with 3"),
        ("print('hello', flush=True); import time; time.sleep(60)", "another protocol"),
        (f"print('{OPENED}', flush=True)\nimport sys; sys.stdin.readline(); sys.stdin.readline(); sys.exit(4)", "exited with 4"),
        (READ + OPEN + PLAY + "print(json.dumps({'id': asked['id'], 'failed': {'kind': 'infrastructure', 'message': 'SandboxError: x'}}), flush=True)", "SandboxError"),
    ],
)  # fmt: skip
async def test_a_process_that_fails_is_an_infrastructure_failure(
    script: Any, environment: VerifiersEnvironment, body: str, message: str
) -> None:
    script(body)
    with pytest.raises(InfrastructureError, match=message):
        await play(environment)


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        (PLAY + "print(json.dumps({'id': asked['id'], 'failed': {'kind': 'environment', 'message': 'TaskError: KeyError'}}), flush=True)", EnvironmentFailedError, "TaskError: KeyError"),
        (None, ConfigError, "-m pip install"),
    ],
)  # fmt: skip
async def test_an_environment_that_fails_is_a_failure_without_a_retry(
    script: Any, environment: VerifiersEnvironment, body: str | None, error: type[Exception], message: str
) -> None:
    absent = "    print(json.dumps({'failed': {'kind': 'not installed', 'message': 'taskset wordle not found.'}}), flush=True)"
    script(READ + (absent if body is None else OPEN + body))
    with pytest.raises(error, match=message):
        await play(environment)


async def test_a_process_that_dies_is_seen_while_a_server_that_it_started_holds_its_pipes(
    script: Any, environment: VerifiersEnvironment, tmp_path: Path
) -> None:
    mark = tmp_path / "server"
    dies = (
        f"if not os.path.exists({str(mark)!r}):\n            import subprocess\n            "
        f"server = subprocess.Popen(['sleep', '60'])\n            "
        f"open({str(mark)!r}, 'w').write(str(server.pid)); os._exit(9)\n        "
    )
    script(READ + OPEN + PLAY + dies + "print(json.dumps({'id': asked['id'], 'played': {'reward': 1.0}}), flush=True)")
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(InfrastructureError, match="exited with 9"):
            await play(environment)
        assert (await play(environment)).reward == 1.0
    await until(lambda: not is_running(int(mark.read_text())), "the server has ended with its group")


async def test_code_that_hangs_is_ended_and_its_rollouts_are_infrastructure_failures(
    script: Any, environment: VerifiersEnvironment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment_module, "_CANCEL_S", 0.1)
    mark = tmp_path / "playing"
    script(
        READ
        + OPEN
        + PLAY
        + f"open({str(mark)!r}, 'a').write('.')\n    if asked['ask'] == 'cancel':\n        import time; time.sleep(60)"
    )
    late, other = asyncio.create_task(play(environment)), asyncio.create_task(play(environment))
    await until(lambda: mark.exists() and mark.read_text() == "..", "both episodes play")
    late.cancel()
    with pytest.raises(InfrastructureError, match="blocks its event loop"):
        await other


def test_the_interpreter_is_named_by_the_command_that_makes_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=f"{PYTHON}: there is no interpreter /none/python"):
        interpreter({PYTHON: "/none/python"})
    monkeypatch.setattr("extras.hub.verifiers.tasks._REPOSITORY", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="run `make install-verifiers`"):
        interpreter({})


def test_tasks_become_rows_that_name_their_environment(script: Any) -> None:
    tasks = "    if asked['ask'] == 'tasks':\n        print(json.dumps({'tasks': [{'idx': 0, 'id': 'a'}, {'idx': 1}]}), flush=True)"
    script(READ + OPEN + tasks)
    source = open_source(DatasetConfig(verifiers="wordle", settings={"x": 1}, id_field="id"), seed=0)
    assert [source[row].task_id for row in range(len(source))] == ["a", "1"]
    named = {"environment": "wordle", "arguments": {"x": 1}}
    assert source[0].data == {"id": "a", "verifiers": named, "task": {"idx": 0, "id": "a"}}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise SystemExit(3)", "ended during loading"),
        (READ + OPEN.replace("false", "true"), "endless tasks: set `limit`"),
        (READ + "    print(json.dumps({'failed': {'kind': 'settings', 'message': 'ValidationError: most'}}), flush=True)", "ValidationError: most"),
    ],
)  # fmt: skip
def test_an_environment_without_tasks_is_a_dataset_error(script: Any, body: str, message: str) -> None:
    script(body)
    with pytest.raises(DatasetError, match=message):
        open_source(DatasetConfig(verifiers="wordle"), seed=0)


async def test_a_rollout_without_tokens_and_a_row_of_another_source_are_refused(script: Any) -> None:
    script(READ + OPEN + PLAY + "print(json.dumps({'id': asked['id'], 'played': {'reward': 1.0}}), flush=True)")
    workflow = build_workflow(WorkflowConfig(name="verifiers"))
    assert isinstance(workflow, Verifiers)
    policy = await served_policy(["42"])
    async with serving() as server:
        context = context_of(policy, server)
        with pytest.raises(ConfigError, match=r"is none of a verifiers environment"):
            await workflow.run(make_task(), context)
        named = {"environment": "wordle", "arguments": {}}
        with pytest.raises(EnvironmentFailedError, match="no tokens to train on"):
            await workflow.run(make_task(verifiers=named, task={"idx": 0}), context)
    await workflow.close()


@pytest.mark.parametrize("place", ["data.train", "data.evaluation.numbers"])
def test_another_workflow_than_the_environments_own_is_refused(place: str) -> None:
    settings = ["workflow.name=single_turn"] if place == "data.train" else ["evaluation.workflow.name=single_turn"]
    with pytest.raises(
        ConfigError, match=rf"{place}\.verifiers is 'guess_number', and the workflow single_turn cannot"
    ):
        load_recipe(ROOT / "recipes" / "guess", settings)
    assert load_recipe(ROOT / "recipes" / "guess", ["workflow.name=mine.own:Workflow"]).data.sections()


URL = "http://127.0.0.1:1/v1"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The program as its interpreter loads it: with its folder as the place of modules."""
    folder = Path(extras.hub.verifiers.child.__file__ or "").parent
    monkeypatch.syspath_prepend(str(folder))
    spec = importlib.util.spec_from_file_location("verifiers_program", folder / "main.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["messages"]


def trace(name: str = "agent", rewards: Any = None, **changes: Any) -> SimpleNamespace:
    agent = SimpleNamespace(
        name=name,
        trainable=changes.pop("trainable", True),
        config=SimpleNamespace(client=SimpleNamespace(base_url=changes.pop("url", URL))),
    )
    scores = {"right": 1.0} if rewards is None else rewards
    values = {key: None if score is None else SimpleNamespace(value=score) for key, score in scores.items()}
    total = sum(value.value for value in values.values() if value is not None)
    facts = {"ok": True, "errors": [], "is_timeout": False, "num_turns": 2, "metrics": {"length": 3, "odd": None}}
    return SimpleNamespace(**{"agent": agent, "rewards": values, "reward": total, **facts, **changes})


def episode(*traces: SimpleNamespace, errors: tuple[SimpleNamespace, ...] = ()) -> SimpleNamespace:
    return SimpleNamespace(traces=list(traces), errors=list(errors))


def error(kind: str) -> SimpleNamespace:
    return SimpleNamespace(type=kind, message="why")


def test_the_reward_is_the_mean_of_the_trained_agents(program: ModuleType) -> None:
    one = program._outcome(episode(trace()), URL)
    assert (one.reward, one.metrics) == (1.0, {"turns": 2.0, "length": 3.0, "reward_right": 1.0})
    two = program._outcome(episode(trace("a", {"x": 1.0, "y": 0.5}), trace("b", {"x": 0.0})), URL)
    assert two.reward == 0.75 and two.metrics["a_reward_y"] == 0.5 and two.metrics["b_turns"] == 2.0
    other = trace("user", {}, trainable=False, url="http://elsewhere/v1")
    assert program._outcome(episode(trace(), other), URL).reward == 1.0


@pytest.mark.parametrize(
    ("played", "kind", "message"),
    [
        (episode(trace(), errors=(error("EnvError"),)), "environment", "EnvError: why"),
        (episode(trace(ok=False, errors=[error("TaskError")])), "environment", "TaskError: why"),
        (episode(trace(ok=False, errors=[error("SandboxError")])), "infrastructure", "SandboxError: why"),
        (episode(trace(ok=False, errors=[error("ProviderError")])), "infrastructure", "ProviderError: why"),
        (episode(trace(is_timeout=True)), "environment", "time limit"),
        (episode(trace(rewards={"right": None})), "environment", "right was not computed"),
        (episode(trace(rewards={})), "environment", "no reward to an agent that is trained"),
        (episode(), "environment", "no reward"),
        (episode(trace(), trace("user", trainable=False)), "settings", r"settings\.user\.client"),
    ],
)
def test_an_episode_without_a_true_reward_is_a_failure(
    program: ModuleType, played: SimpleNamespace, kind: str, message: str
) -> None:
    outcome = program._outcome(played, URL)
    assert outcome.kind == kind and re.search(message, outcome.message)
