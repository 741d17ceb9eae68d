"""Structured status, limits and statistics of tool calls, on scripted tools."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any

import pytest

from services.common.config.envgateway import ToolConfig
from services.common.errors import CapacityError, ConfigError, DeadlineError, InfrastructureError, InvalidRequestError
from services.common.text.tools import ToolCall, ToolStatus
from services.common.tools import ToolError, ToolResult
from services.envgateway.tools import registry as session_module
from services.envgateway.tools.registry import GatewayToolSession, ToolBox
from services.envgateway.tools.tools import StateLostError
from tests.waiting import WAIT_S

S = ToolStatus

BRIEF = ToolConfig(timeout_s=1.0)  # enough for a call that answers, on a busy machine


class Echo:
    name = "echo"
    description = "Says it again."
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"text": {"type": "string"}, "times": {"type": "integer"}},
        "required": ["text"],
    }
    timeout_s = WAIT_S
    concurrency = 8

    def __init__(self) -> None:
        self.running = 0
        self.most_running = 0

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult | str:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            match arguments["text"]:
                case "sleep":
                    await asyncio.Event().wait()
                case "broken":
                    raise InfrastructureError("the line is dead")
                case "late":
                    raise DeadlineError("a named wait ran out")
                case "impossible":
                    raise ToolError("there is nothing to say again")
                case "bug":
                    raise KeyError("a fault of the tool's author")
                case "own timeout":
                    raise TimeoutError("of a socket, say")
                case "result":
                    return ToolResult(status=S.PROGRAM_ERROR, text="as told")
            await asyncio.sleep(0.005)
            return str(arguments["text"]) * arguments.get("times", 1)
        finally:
            self.running -= 1


class Plain:
    """Not asynchronous, and slow."""

    name = "plain"
    description = "Sleeps."
    parameters: Mapping[str, Any] = {"type": "object", "properties": {}}

    def call(self, arguments: Mapping[str, Any]) -> str:
        time.sleep(0.01)
        return "slept"


class Counter:
    """Counts the calls of each trajectory."""

    name = "count"
    description = "How many calls there were."
    parameters: Mapping[str, Any] = {"type": "object", "properties": {"lose": {"type": "boolean"}}}

    def __init__(self) -> None:
        self.opened: list[Count] = []

    def open(self) -> Count:
        self.opened.append(Count())
        return self.opened[-1]


class Count:
    def __init__(self) -> None:
        self.calls = 0
        self.closed = 0

    async def call(self, arguments: Mapping[str, Any]) -> str:
        if arguments.get("lose"):
            raise StateLostError("the state is gone")
        self.calls += 1
        return str(self.calls)

    async def close(self) -> None:
        self.closed += 1
        raise RuntimeError("closing fails, and others are closed all the same")


def _session(*tools: Any, **limits: ToolConfig) -> GatewayToolSession:
    tools = tools or (Echo(),)
    return GatewayToolSession(ToolBox(tools, limits), [tool.name for tool in tools])


def _call(name: str, arguments: Any) -> str:
    return json.dumps({"name": name, "arguments": arguments})


@pytest.mark.parametrize(
    ("content", "status", "text"),
    [
        (_call("echo", {"text": "an error, they say"}), S.OK, "an error, they say"),
        (_call("echo", {"text": "ab", "times": 2}), S.OK, "abab"),
        (_call("echo", {"text": "result"}), S.PROGRAM_ERROR, "as told"),
        (_call("echo", {}), S.INVALID_ARGUMENTS, "'text' is missing"),
        (_call("echo", {"txt": "x"}), S.INVALID_ARGUMENTS, "did you mean it by 'txt'?"),
        (_call("echo", {"text": 5}), S.INVALID_ARGUMENTS, "5 is not of type 'string'"),
        (_call("echo", {"text": "x", "times": "2"}), S.INVALID_ARGUMENTS, "'times': '2' is not of type 'integer'"),
        (_call("echo", {"text": "x", "volume": 11}), S.INVALID_ARGUMENTS, "unknown argument 'volume'"),
        (_call("shout", {"text": "x"}), S.UNKNOWN_TOOL, "no tool 'shout'; there is echo"),
        (_call("echo", {"text": "sleep"}), S.TIME_LIMIT, "stopped after 1 s"),
        (_call("echo", {"text": "impossible"}), S.TOOL_ERROR, "nothing to say again"),
        ("{", S.MALFORMED_CALL, "not valid JSON"),
        (_call("echo", "x"), S.MALFORMED_CALL, '"arguments" must be a JSON object'),
    ],
)
async def test_the_status_of_a_call(content: str, status: ToolStatus, text: str) -> None:
    session = _session(echo=BRIEF) if status is S.TIME_LIMIT else _session()
    result = await session.answer(content)
    assert result.status is status and text in result.text
    metrics = session.statistics.metrics()
    assert metrics["tool_calls"] == 1 and metrics["tool_errors"] == float(status is not S.OK)
    assert {name for name in metrics if name.startswith("tool_errors_")} == (
        {f"tool_errors_{status}"} if status is not S.OK else set()
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("broken", "the line is dead"),
        ("late", "a named wait ran out"),
        ("bug", "raised KeyError"),
        ("own timeout", "raised TimeoutError"),
    ],
)
async def test_machinery_that_failed_is_no_result_and_not_counted_against_the_policy(text: str, told: str) -> None:
    box = ToolBox([Echo()])
    session = GatewayToolSession(box, ["echo"])
    with pytest.raises(InfrastructureError, match=told):
        await session.answer(ToolCall(name="echo", arguments={"text": text}))
    assert session.statistics.metrics()["tool_calls"] == 0 and box.counts == {"infrastructure": 1}


class Leaving(Counter):
    def open(self) -> Count:
        raise SystemExit("no licence")


async def test_a_tool_that_leaves_is_told_and_ends_no_process() -> None:
    with pytest.raises(InfrastructureError, match="count raised SystemExit: no licence"):
        await _session(Leaving()).answer(ToolCall(name="count", arguments={}))


async def test_concurrency_is_bounded_per_tool_and_a_long_queue_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    tool = Echo()
    tool.concurrency = 2
    session = _session(tool)
    await asyncio.gather(*(session.answer(ToolCall(name="echo", arguments={"text": "x"})) for _ in range(10)))
    assert tool.most_running == 2
    monkeypatch.setattr(session_module, "_QUEUE_S", 0.05)
    stuck = [asyncio.create_task(session.answer(ToolCall(name="echo", arguments={"text": "sleep"}))) for _ in range(2)]
    await asyncio.sleep(0.01)
    with pytest.raises(CapacityError) as full:
        await session.answer(ToolCall(name="echo", arguments={"text": "x"}))
    assert full.value.retry_after_s
    for call in stuck:
        call.cancel()
    await asyncio.gather(*stuck, return_exceptions=True)


@pytest.mark.parametrize(
    ("cut", "shown"),
    [("start", " ...(cut)... " + "b" * 7), ("middle", "aaaa ...(cut)... bbb"), ("end", "a" * 7 + " ...(cut)... ")],
)
async def test_a_response_is_cut_where_the_tool_says(cut: Any, shown: str) -> None:
    session = _session(echo=ToolConfig(max_chars=20, cut=cut))
    assert (await session.answer(ToolCall(name="echo", arguments={"text": "a" * 50 + "b" * 50}))).text == shown
    longer = GatewayToolSession(ToolBox([Echo()], {"echo": ToolConfig(max_chars=20, cut=cut)}), ["echo"], max_chars=64)
    assert len((await longer.answer(ToolCall(name="echo", arguments={"text": "a" * 100}))).text) == 64


async def test_a_state_belongs_to_one_trajectory_and_ends_with_it() -> None:
    counter = Counter()
    box = ToolBox([counter, Plain()])
    first, second = (GatewayToolSession(box, ["count", "plain"]) for _ in range(2))
    assert [(await first.answer(ToolCall(name="count", arguments={}))).text for _ in range(3)] == ["1", "2", "3"]
    assert (await second.answer(ToolCall(name="count", arguments={}))).text == "1"
    assert (await first.answer(ToolCall(name="plain", arguments={}))).text == "slept"
    for session in (first, second):
        await session.close()
        await session.close()
    assert [state.closed for state in counter.opened] == [1, 1]
    assert first.statistics.metrics()["tool_calls_count"] == 3 and first.statistics.metrics()["tool_calls_plain"] == 1


async def test_a_lost_state_is_an_error_of_its_own() -> None:
    session = _session(Counter())
    with pytest.raises(StateLostError):
        await session.answer(ToolCall(name="count", arguments={"lose": True}))


def test_a_tool_that_is_not_there_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="the gateway has echo"):
        GatewayToolSession(ToolBox([Echo()]), ["python"])


class Unchecked(Echo):
    parameters = {"type": "object", "properties": {"text": {"type": "string", "minLength": "1"}}}


class Nameless:
    description = ""
    parameters: Mapping[str, Any] = {}


class Callless:
    name, description = "callless", ""
    parameters: Mapping[str, Any] = {"type": "object"}


@pytest.mark.parametrize(
    ("tools", "limits", "told"),
    [
        ([Echo(), Echo()], {}, "two named 'echo', .*test_tools.py:"),
        ([Unchecked()], {}, "text.minLength: '1' is not of type 'integer'"),
        ([Nameless()], {}, "Nameless.name is missing"),
        ([Callless()], {}, "neither call"),
        ([Echo()], {"ecko": ToolConfig()}, "no such tool; there is echo"),
    ],
)
def test_a_tool_that_cannot_be_used_is_refused_at_start(tools: Any, limits: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        ToolBox(tools, limits)
