"""The tool loop with tools of an MCP server: the gateway runs them in an episode of the rollout's own."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.common.config.loading import validate
from services.common.errors import ConfigError, InfrastructureError
from services.common.records import Task
from services.inference.workflows.base import Episode, Step
from services.inference.workflows.tools import ToolUse, ToolUseSettings, check_servers
from tests.unit.inference.fakes import FakeGateway, make_context, make_task, qwen_like_chat, served_policy

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


class Tools(FakeGateway):
    """Offers ``add``, whose arguments it checks; keeps what was asked."""

    def __init__(self, *failures: Exception) -> None:
        super().__init__(failures=failures)
        self.created: list[tuple[str, Any]] = []
        self.steps: list[tuple[int, str]] = []
        self.closed: list[str] = []

    async def create_episode(self, environment: str, task: Task, seed: int) -> Episode:
        self.created.append((environment, task.data))
        return Episode(episode_id="e1", observation="", tools=(ADD,))

    async def step(self, episode_id: str, turn: int, action: str) -> Step:
        self._maybe_fail()
        self.steps.append((turn, action))
        arguments = json.loads(action)["arguments"]
        if set(arguments) != {"a", "b"}:
            return Step(observation="Error: b", reward=0.0, done=False, metrics={"tool_status_invalid_arguments": 1.0})
        total = arguments["a"] + arguments["b"]
        return Step(observation=str(total), reward=0.0, done=False, metrics={"tool_status_ok": 1.0})

    async def close(self, episode_id: str) -> None:
        self.closed.append(episode_id)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def played(texts: list[str], gateway: Tools) -> Any:
    workflow = ToolUse(ToolUseSettings(tools=["mcp:units"], reward="boxed", max_tool_response_chars=99))
    return await workflow.run(make_task(), make_context(await served_policy(texts), gateway, max_new_tokens=120))


async def test_the_tools_of_the_server_are_listed_called_and_counted() -> None:
    gateway = Tools()
    outcome = await played([call("add", a=40, b=2), call("add", a=1), call("sub"), "\\boxed{42}"], gateway)
    (sequence,) = outcome.sequences
    text = qwen_like_chat().decode([token for segment in sequence.segments for token in segment.token_ids.tolist()])
    assert '"name": "add"' in text, "the prompt lists the tool"
    assert "<tool_response>\n42\n</tool_response>" in text
    assert "no tool 'sub'; there is add" in text
    assert gateway.created == [("tools", {"environment": {"tools": ["mcp:units"], "max_response_chars": 99}})]
    assert [turn for turn, _ in gateway.steps] == [1, 2], "a call of no tool is answered here"
    assert sequence.metrics["tool_errors_invalid_arguments"] == 1
    assert sequence.metrics["tool_errors_unknown_tool"] == 1
    assert sequence.metrics["tool_calls"] == 3
    assert gateway.closed == ["e1"]


async def test_a_failed_call_fails_the_rollout_and_leaves_no_episode() -> None:
    gateway = Tools(InfrastructureError("the server is gone"))
    with pytest.raises(InfrastructureError, match="the server is gone"):
        await played([call("add", a=40, b=2), "\\boxed{42}"], gateway)
    assert gateway.closed == ["e1"]


@pytest.mark.parametrize(
    ("names", "servers", "told"),
    [
        (["mcp:unit"], {"units": {"command": ["python"]}}, "did you mean 'mcp:units'?"),
        (["mcp:units/add"], {}, r"write envgateway.mcp.units: {command: \[...\]}"),
    ],
)
def test_a_server_that_the_recipe_lacks_is_told(names: list[str], servers: dict[str, Any], told: str) -> None:
    recipe = validate(
        {
            "name": "r",
            "policies": {"a": {"model": {"path": "none"}}},
            "data": {"train": {"path": "rows.jsonl"}},
            "evaluation": {"at_start": False, "at_end": False},
            "envgateway": {"mcp": servers},
        },
        "r",
    )
    with pytest.raises(ConfigError, match=told):
        check_servers(names, recipe)
