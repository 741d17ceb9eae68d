"""The workflow: agents as functions and as programs, their rewards, and the attribution of failures."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import yaml

from services.common.config.data import WorkflowConfig
from services.common.errors import ConfigError, InfrastructureError
from services.inference.endpoint.server import EndpointServer
from services.inference.workflows.base import Outcome
from services.inference.workflows.external_agent import AgentFailedError, run_command
from services.inference.workflows.registry import build_workflow
from tests.documented import blocks
from tests.integration.inference.endpoint_peers import asking, context_of, session_of
from tests.running import is_running
from tests.unit.inference.fakes import make_task, served_policy
from tests.waiting import WAIT_S, until

HERE = "tests.integration.inference.test_external_agent"
CALL = '<tool_call>{"name": "add", "arguments": {"a": 20, "b": 22}}</tool_call>'


async def ask(base_url: str, session: str) -> str:
    async with openai.AsyncOpenAI(base_url=base_url, api_key=session, max_retries=0) as client:
        answer = await client.chat.completions.create(model="default", messages=[{"role": "user", "content": "go"}])
    return answer.choices[0].message.content or ""


async def generous(task: Mapping[str, Any], base_url: str, session: str, bonus: float = 0.0) -> float:
    return (await ask(base_url, session) == "42") + bonus


async def quiet(task: Mapping[str, Any], base_url: str, session: str) -> None:
    await ask(base_url, session)


def blocking(task: Mapping[str, Any], base_url: str, session: str) -> float:
    with openai.OpenAI(base_url=base_url, api_key=session, max_retries=0) as client:
        client.chat.completions.create(model="default", messages=[{"role": "user", "content": "go"}])
    return 0.5


async def seeded(task: Mapping[str, Any], base_url: str, session: str, episode_seed: int, seed: int) -> float:
    await ask(base_url, session)
    return episode_seed + seed / 10


async def idle(task: Mapping[str, Any], base_url: str, session: str) -> float:
    return 1.0


async def endless(task: Mapping[str, Any], base_url: str, session: str) -> float:
    await asyncio.sleep(60)
    return 1.0


async def forgiving(task: Mapping[str, Any], base_url: str, session: str) -> float:
    try:
        await ask(base_url, session)
    except openai.APIError:
        pass
    return 1.0


async def play(server: EndpointServer, settings: Mapping[str, Any], texts: list[str], **gateway: Any) -> Outcome:
    workflow = build_workflow(WorkflowConfig(name="external_agent", settings=dict(settings)))
    policy = await served_policy(texts)
    if gateway.pop("broken", False):
        await policy.engine.stop()
    return await workflow.run(make_task(), context_of(policy, server, **gateway))


@pytest.mark.parametrize(
    ("settings", "reward"),
    [
        ({"agent": f"{HERE}:generous"}, 1.0),
        ({"agent": f"{HERE}:generous", "arguments": {"bonus": 0.25}}, 1.25),
        ({"agent": f"{HERE}:blocking"}, 0.5),
        ({"agent": f"{HERE}:seeded"}, 2.1),
        ({"agent": f"{HERE}:seeded", "arguments": {"seed": 5}}, 2.5),
        ({"agent": f"{HERE}:quiet", "reward": "math"}, 0.75),
    ],
)
async def test_an_agents_rollout_is_its_sequences_with_its_reward(
    server: EndpointServer, settings: dict[str, Any], reward: float
) -> None:
    outcome = await play(server, settings, ["42"], reward=lambda task, text: 0.75 if text == "42" else 0.0)
    (sequence,) = outcome.sequences
    assert outcome.reward == sequence.reward == reward
    assert [segment.is_policy for segment in sequence.segments] == [False, True]


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"agent": f"{HERE}:idle"}, AgentFailedError, "without an answer"),
        ({"agent": f"{HERE}:endless", "timeout_s": 0.2}, AgentFailedError, r"longer than 0\.2 s"),
        ({"agent": f"{HERE}:quiet"}, ConfigError, "names none"),
        ({"command": ["/no/such/program"]}, AgentFailedError, "cannot be started"),
        ({"command": [sys.executable, "-c", "raise SystemExit('oh no')"]}, AgentFailedError, "code 1: oh no"),
        ({}, ConfigError, "has no agent"),
        ({"agent": f"{HERE}:quiet", "conversation_reward": f"{HERE}:PROGRAM"}, ConfigError, "is of type str"),
    ],
)
async def test_an_agent_that_fails_is_no_reward(
    server: EndpointServer, settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        await play(server, settings, ["42"])


async def test_what_broke_under_an_agent_is_no_reward_whatever_it_returns(server: EndpointServer) -> None:
    with pytest.raises(InfrastructureError):
        await play(server, {"agent": f"{HERE}:forgiving"}, ["42"], broken=True)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_behind_the_endpoint_tells_the_agent_its_reason_and_place(
    server: EndpointServer, stream: bool
) -> None:
    class Broken:
        async def generate(self, request: Any) -> Any:
            raise AttributeError("'Settings' object has no attribute 'format'")

    policy = replace(await served_policy(["42"]), engine=Broken())  # type: ignore[arg-type]
    async with asking(server, session_of(policy)) as client:
        with pytest.raises(openai.InternalServerError) as told:
            await client.chat.completions.create(
                model="default", messages=[{"role": "user", "content": "go"}], stream=stream
            )
    assert "has no attribute 'format'" in str(told.value) and f"{__file__}:" in str(told.value)


PROGRAM = """
import json, os, sys, urllib.request
task = json.loads(sys.stdin.read())
body = json.dumps({"messages": [{"role": "user", "content": task["question"]}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
print("thinking")
print(json.dumps({"reward": float(said == task["answer"])}))
"""


async def test_a_program_is_an_agent_and_finds_what_it_needs_in_its_environment(server: EndpointServer) -> None:
    """Anthropic's client adds /v1 to its base URL."""
    checks = (
        'assert os.environ["ANTHROPIC_BASE_URL"] + "/v1" == os.environ["OPENAI_BASE_URL"]\n'
        'assert os.environ["ANTHROPIC_API_KEY"] == os.environ["OPENAI_API_KEY"] == os.environ["ROLLMILL_SESSION"]\n'
        'assert (os.environ["ROLLMILL_SEED"], os.environ["ROLLMILL_EPISODE_SEED"]) == ("1", "2")\n'
    )
    outcome = await play(server, {"command": [sys.executable, "-c", PROGRAM + checks]}, ["42"])
    assert outcome.reward == 1.0


@pytest.mark.parametrize("leaves", ["sleep 600", "setsid sleep 600"])
async def test_a_program_that_leaves_a_server_behind_has_ended_with_its_reward(tmp_path: Path, leaves: str) -> None:
    file = tmp_path / "server"
    command = ["/bin/sh", "-c", f"{leaves} & echo $! > {file}; echo '{{\"reward\": 0.5}}'"]
    try:
        reward = await asyncio.wait_for(run_command(command, {}, "http://127.0.0.1:1/v1", "s", {}), WAIT_S)
        assert reward == 0.5
        if leaves == "sleep 600":
            await until(lambda: not is_running(int(file.read_text())), "the server has ended with its group")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(file.read_text()), signal.SIGKILL)


async def test_a_program_ends_with_its_rollout_and_all_that_it_started(server: EndpointServer, tmp_path: Path) -> None:
    script = f"sleep 60 & echo $! > {tmp_path}/child; echo $$ > {tmp_path}/parent; wait"
    playing = asyncio.create_task(play(server, {"command": ["/bin/sh", "-c", script]}, ["42"]))
    await until(lambda: (tmp_path / "parent").exists() and (tmp_path / "parent").read_text(), "the program")
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing

    for name in ("child", "parent"):
        pid = int((tmp_path / name).read_text())
        await until(lambda pid=pid: not is_running(pid), f"the end of the {name}")  # type: ignore[misc]


@pytest.fixture
def documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The page's agent in a folder of its own, and its recipe."""
    (text,) = blocks("endpoint.md", "python")
    (tmp_path / "adder.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield yaml.safe_load(blocks("endpoint.md", "yaml")[0])
    sys.modules.pop("adder", None)


@pytest.mark.parametrize(("last", "reward"), [("It is 42.", 1.0), ("It is 41.", 0.0)])
async def test_the_documented_agent_runs(
    documented: dict[str, Any], server: EndpointServer, last: str, reward: float
) -> None:
    outcome = await play(server, documented["workflow"]["settings"], [CALL, last])
    (sequence,) = outcome.sequences
    assert outcome.reward == reward
    assert [segment.is_policy for segment in sequence.segments] == [False, True, False, True]


@pytest.mark.parametrize("agent", ["agent", pytest.param("anthropic_agent", marks=pytest.mark.needs("anthropic"))])
async def test_the_agents_of_the_examples_run(
    server: EndpointServer, monkeypatch: pytest.MonkeyPatch, agent: str
) -> None:
    monkeypatch.chdir(Path(__file__).parents[3] / "examples")
    monkeypatch.setattr(sys, "path", list(sys.path))
    outcome = await play(server, {"agent": f"{agent}:agent", "arguments": {"max_turns": 3}}, [CALL, "It is 42."])
    (sequence,) = outcome.sequences
    assert outcome.reward == 1.0
    assert [segment.is_policy for segment in sequence.segments] == [False, True, False, True]
    sys.modules.pop(agent, None)


async def poster(task: Mapping[str, Any], base_url: str, session: str) -> None:
    await ask(base_url, session)
    async with aiohttp.ClientSession(headers={"X-Session-ID": session}) as http:
        await http.post(f"{base_url}/rewards", json={"reward": 0.125})


async def test_a_posted_reward_is_the_rollouts_where_the_agent_returns_none(server: EndpointServer) -> None:
    outcome = await play(server, {"agent": f"{HERE}:poster"}, ["42"])
    assert outcome.reward == outcome.sequences[0].reward == 0.125


async def two_agents(task: Mapping[str, Any], base_url: str, session: str) -> None:
    async with openai.AsyncOpenAI(base_url=base_url, api_key=session, max_retries=0) as client:
        for question in ("go", "another"):
            await client.chat.completions.create(model="default", messages=[{"role": "user", "content": question}])


def by_question(task: Mapping[str, Any], conversations: list[dict[str, Any]]) -> list[float]:
    return [float(each["messages"][0]["content"] == "go" and each["parent"] is None) for each in conversations]


def one_too_few(task: Mapping[str, Any], conversations: list[dict[str, Any]]) -> list[float]:
    return [1.0] * (len(conversations) - 1)


def nothing(task: Mapping[str, Any], conversations: list[dict[str, Any]]) -> None:
    return None


async def last_question(task: Mapping[str, Any], conversations: list[dict[str, Any]]) -> float:
    return float(conversations[-1]["messages"][-2]["content"] == "another")


@pytest.mark.parametrize(("function", "rewards"), [("by_question", [1.0, 0.0]), ("last_question", [1.0, 1.0])])
async def test_a_function_rewards_all_conversations_or_each(
    server: EndpointServer, function: str, rewards: list[float]
) -> None:
    settings = {"agent": f"{HERE}:two_agents", "conversation_reward": f"{HERE}:{function}"}
    outcome = await play(server, settings, ["42"])
    assert [sequence.reward for sequence in outcome.sequences] == rewards
    assert outcome.reward == sum(rewards) / 2


@pytest.mark.parametrize(("function", "message"), [("one_too_few", "1 numbers for 2"), ("nothing", "returned None")])
async def test_a_function_of_conversations_that_gives_no_rewards_fails_the_rollout(
    server: EndpointServer, function: str, message: str
) -> None:
    settings = {"agent": f"{HERE}:two_agents", "conversation_reward": f"{HERE}:{function}"}
    with pytest.raises(ValueError, match=message):
        await play(server, settings, ["42"])
