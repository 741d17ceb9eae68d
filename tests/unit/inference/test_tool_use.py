"""The tool loop, turn by turn: a scripted policy, a gateway in this process, and the record of each ending."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.common.errors import ConfigError
from services.common.records import StopReason, TokenSequence
from services.inference.workflows.base import Execution, Outcome, ProgramStatus
from services.inference.workflows.tools import ToolUse, ToolUseSettings
from tests.unit.inference.fakes import (
    FakeGateway,
    RecordingEngine,
    make_context,
    make_task,
    qwen_like_chat,
    served_policy,
)

CODE = "<tool_call>print(6*7)</tool_call>"
ANSWER = "\\boxed{42}"
PROGRAMS = {
    "print(6*7)": Execution(status=ProgramStatus.OK, stdout="42\n"),
    "boom": Execution(status=ProgramStatus.RUNTIME_ERROR, stdout="so far\n", stderr="NameError: boom\n"),
    "spin": Execution(status=ProgramStatus.TIME_LIMIT, wall_time_s=4.0),
    "eat": Execution(status=ProgramStatus.MEMORY_LIMIT),
    "flood": Execution(status=ProgramStatus.OUTPUT_LIMIT, stdout="x" * 1000),
    "silent": Execution(status=ProgramStatus.OK),
    "error word": Execution(status=ProgramStatus.OK, stdout="Error: just a word\n"),
}


async def play(
    texts: list[str], gateway: FakeGateway | None = None, sampling: dict[str, Any] | None = None, **settings: Any
) -> tuple[Outcome, TokenSequence, list[str], FakeGateway]:
    """Returns outcome, its sequence, the tool responses as text, and the gateway."""
    gateway = gateway or FakeGateway(PROGRAMS)
    policy = await served_policy(texts)
    workflow = ToolUse(ToolUseSettings(**{"format": "code", "reward": "boxed", **settings}))
    outcome = await workflow.run(make_task(), make_context(policy, gateway, **(sampling or {})))
    (sequence,) = outcome.sequences
    read = [qwen_like_chat().decode(s.token_ids.tolist()) for s in sequence.segments if not s.is_policy][1:]
    responses = [text.split("<tool_response>\n")[1].split("\n</tool_response>")[0] for text in read]
    return outcome, sequence, responses, gateway


def tool_json(code: str, **changes: Any) -> str:
    call = {"name": "python_code_with_standard_io", "arguments": {"code": code, "input": ""}, **changes}
    return f"<tool_call>{json.dumps(call)}</tool_call>"


@pytest.mark.parametrize(
    ("texts", "settings", "stop_reason", "end", "turns", "executed"),
    [
        ([ANSWER], {}, StopReason.STOP, "no_call", 1, 0),
        ([CODE, ANSWER], {}, StopReason.STOP, "no_call", 2, 1),
        ([CODE, CODE, CODE, CODE, CODE], {"max_turns": 3}, StopReason.TURN_LIMIT, "turn_limit", 3, 2),
        ([CODE, ANSWER], {"max_turns": 1}, StopReason.TURN_LIMIT, "turn_limit", 1, 0),
        ([CODE, "z" * 400], {}, StopReason.LENGTH, "length", 2, 1),
        ([CODE, ANSWER], {"max_response_tokens": 20}, StopReason.LENGTH, "tool_response", 1, 1),
    ],
)
async def test_each_ending_is_recorded(
    texts: list[str], settings: dict[str, Any], stop_reason: StopReason, end: str, turns: int, executed: int
) -> None:
    _, sequence, _, gateway = await play(texts, **settings)
    assert sequence.stop_reason is stop_reason
    ends = {name: value for name, value in sequence.metrics.items() if name.startswith("end_")}
    assert {name for name, value in ends.items() if value} == {f"end_{end}"}
    assert len(ends) == 4
    assert sequence.metrics["turns"] == turns
    assert sequence.metrics["tool_calls"] == len(gateway.executed) == executed
    assert sequence.metrics["truncated"] == float(end == "length")


@pytest.mark.parametrize(
    ("program", "response", "kind"),
    [
        ("print(6*7)", "42", None),
        ("boom", "so far\nNameError: boom", "program_error"),
        ("spin", "TimeoutError: stopped after 4.0 s", "time_limit"),
        ("eat", "MemoryError: the program used too much memory", "memory_limit"),
        ("silent", "(no output)", None),
        ("error word", "Error: just a word", None),
    ],
)
async def test_the_policy_reads_what_its_program_did(program: str, response: str, kind: str | None) -> None:
    _, sequence, responses, _ = await play([f"<tool_call>{program}</tool_call>", ANSWER])
    assert responses == [response]
    assert sequence.metrics["tool_errors"] == float(kind is not None)
    assert {k for k in sequence.metrics if k.startswith("tool_errors_")} == ({f"tool_errors_{kind}"} if kind else set())


@pytest.mark.parametrize(
    ("call", "told", "kind"),
    [
        ("<tool_call>{nonsense}</tool_call>", "not valid JSON", "malformed_call"),
        (tool_json("1", name="browser"), "no tool 'browser'", "unknown_tool"),
        (tool_json("1", arguments={"code": "1"}), "'input' is missing", "invalid_arguments"),
        (tool_json("1", arguments={"code": 1, "input": ""}), "'code': 1 is not of type 'string'", "invalid_arguments"),
        (tool_json("1", arguments={"code": "1", "input": "", "x": 1}), "unknown argument 'x'", "invalid_arguments"),
        ("<tool_call>never closed", "opened and not closed", "malformed_call"),
    ],
)
async def test_a_wrong_call_is_answered_with_its_error_and_not_run(call: str, told: str, kind: str) -> None:
    _, sequence, responses, gateway = await play([call, ANSWER], format="json")
    assert told in responses[0]
    assert gateway.executed == []
    assert sequence.metrics[f"tool_errors_{kind}"] == 1.0
    assert sequence.stop_reason is StopReason.STOP


async def test_a_json_call_runs_with_its_standard_input() -> None:
    call = tool_json("", arguments={"code": "print(input())", "input": "zwölf"})
    _, _, responses, gateway = await play([call, ANSWER], format="json")
    assert gateway.executed == [("print(input())", "zwölf".encode(), True)]
    assert responses == ["ran print(input())"]


@pytest.mark.parametrize("lists_tools", [True, False])
async def test_the_schemas_of_the_tools_stand_in_the_system_turn(lists_tools: bool) -> None:
    from services.common.text.chat import Chat
    from services.inference.engine.base import ByteTokenizer

    chat = qwen_like_chat() if lists_tools else Chat(ByteTokenizer())
    policy = await served_policy([ANSWER], chat=chat)
    await ToolUse(ToolUseSettings(reward="boxed")).run(make_task(), make_context(policy, FakeGateway()))
    assert isinstance(policy.engine, RecordingEngine)
    prompt = chat.decode(policy.engine.requests[0].prompt_ids)
    system = prompt.split("<|im_end|>")[0]
    assert '"name": "python_code_with_standard_io"' in system
    assert "<tools>" in system


def test_an_unknown_tool_in_a_recipe_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"workflow\.settings\.tools.*python_code_with_standard_io"):
        ToolUse(ToolUseSettings(tools=["browser"]))
