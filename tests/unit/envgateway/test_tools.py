"""Structured status of tool calls, on scripted tools."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from services.common.errors import InfrastructureError, InvalidRequestError
from services.envgateway.envs.tools import ToolBox, ToolResult, ToolStatus


class Echo:
    def __init__(self, concurrency: int = 8) -> None:
        self.schema: Mapping[str, Any] = {
            "type": "function",
            "function": {
                "name": "echo",
                "description": "Says it again.",
                "parameters": {
                    "type": "object",
                    "properties": {"text": {"type": "string"}, "times": {"type": "integer"}},
                    "required": ["text"],
                },
            },
        }
        self.timeout_s = 0.1
        self.concurrency = concurrency
        self.running = 0
        self.most_running = 0

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            if arguments["text"] == "sleep":
                await asyncio.sleep(5)
            if arguments["text"] == "broken":
                raise InfrastructureError("the line is dead")
            await asyncio.sleep(0.005)
            return ToolResult(status=ToolStatus.OK, text=arguments["text"])
        finally:
            self.running -= 1


@pytest.mark.parametrize(
    ("name", "arguments", "status", "text"),
    [
        ("echo", {"text": "an error, they say"}, ToolStatus.OK, "an error, they say"),
        ("echo", {}, ToolStatus.ERROR, "'text' is missing"),
        ("echo", {"text": 5}, ToolStatus.ERROR, "must be a string"),
        ("echo", {"text": "x", "volume": 11}, ToolStatus.ERROR, "unknown argument 'volume'"),
        ("shout", {"text": "x"}, ToolStatus.ERROR, "no tool 'shout'; there is echo"),
        ("echo", {"text": "sleep"}, ToolStatus.TIMEOUT, "stopped after 0.1 s"),
        ("echo", {"text": "broken"}, ToolStatus.INFRA, "the line is dead"),
    ],
)
async def test_the_status_of_a_call(name: str, arguments: Mapping[str, Any], status: ToolStatus, text: str) -> None:
    box = ToolBox([Echo()])
    result = await box.call(name, arguments)
    assert result.status is status and text in result.text
    assert box.counts[status] == 1


async def test_concurrency_is_bounded_per_tool() -> None:
    tool = Echo(concurrency=2)
    box = ToolBox([tool])
    await asyncio.gather(*(box.call("echo", {"text": "x"}) for _ in range(10)))
    assert tool.most_running == 2


def test_a_tool_that_is_not_there_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="the gateway has echo"):
        ToolBox([Echo()]).schemas(["python"])
