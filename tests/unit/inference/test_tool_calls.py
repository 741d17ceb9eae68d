"""Parsing of tool calls, and error messages for the policy."""

from __future__ import annotations

import pytest

from services.common.text.tools import MalformedCall, ToolCall, cut_text, find_call, parse_json_call, split_calls


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no call", None),
        ("a </tool_call> alone", None),
        ("<tool_call>print(1)</tool_call>", "print(1)"),
        ("so <tool_call>\nprint(1)\n</tool_call> then", "\nprint(1)\n"),
        ("<tool_call>a</tool_call><tool_call>b</tool_call>", "a"),
        ("<tool_call></tool_call>", ""),
        ("<think>Not <tool_call>a</tool_call>.</think> 3", None),
        ("<think>x</think> <tool_call>a</tool_call>", "a"),
        ("<think>x</think> y <think>no <tool_call>a</tool_call></think> <tool_call>b</tool_call>", "b"),
        ("<think>it never ends <tool_call>a</tool_call>", None),
        ("3 <think>it never ends <tool_call>a</tool_call>", None),
        ("begun by the prompt <tool_call>a</tool_call> no</think> <tool_call>b</tool_call>", "b"),
        ("begun <tool_call> not closed</think><tool_call>b</tool_call>", "b"),
        ("<tool_call>print('</think>')</tool_call>", "print('</think>')"),
        ("<tool_call>print('<think>')</tool_call>", "print('<think>')"),
        ("<think>a<think>b</think><tool_call>c</tool_call></think>", None),
        ("<think>a<think>b</think>c</think><tool_call>d</tool_call>", "d"),
        ('<tool_call>{"a": "</tool_call>"}</tool_call>', '{"a": "</tool_call>"}'),
        ('<tool_call>{"a": "<tool_call>"}</tool_call>', '{"a": "<tool_call>"}'),
        ('`<tool_call>` is the tag. <tool_call>{"a": 1}</tool_call>', '{"a": 1}'),
        ("<tool_call>print('<tool_call>')</tool_call>", "print('<tool_call>')"),
    ],
)
def test_the_first_call_of_a_turn_is_found(text: str, expected: str | None) -> None:
    assert find_call(text) == expected


@pytest.mark.parametrize(
    ("text", "thinks", "expected"),
    [
        ("so <tool_call>a</tool_call> no</think>x<tool_call>b</tool_call>", True, ("so <tool_call>a</tool_call> no</think>x", ["b"])),
        ("so <tool_call>a</tool_call>", True, ("so <tool_call>a</tool_call>", [])),
        ("<think>so <tool_call>a</tool_call></think>", True, ("<think>so <tool_call>a</tool_call></think>", [])),
        ("x<tool_call>a</tool_call><think>no <tool_call>b</tool_call></think>y", False, ("x<think>no <tool_call>b</tool_call></think>y", ["a"])),
        ("x<tool_call>a</tool_call> <tool_call>b", False, ("x <tool_call>b", ["a"])),
    ],
)  # fmt: skip
def test_calls_in_thoughts_stay_text(text: str, thinks: bool, expected: tuple[str, list[str]]) -> None:
    assert split_calls(text, thinks=thinks) == expected


def test_a_call_that_is_not_closed_is_malformed() -> None:
    assert isinstance(find_call("<tool_call>print(1)"), MalformedCall)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"name": "run", "arguments": {"code": "1"}}', ToolCall(name="run", arguments={"code": "1"})),
        ('\n{"name": "run"}\n', ToolCall(name="run", arguments={})),
        ('{"name": "run", "arguments": {}} extra', "Extra data"),
        ("{'name': 'run'}", "property name"),
        ("print(1)", "not valid JSON"),
        ("[1]", "one JSON object"),
        ('{"arguments": {}}', '"name"'),
        ('{"name": 1, "arguments": {}}', '"name"'),
        ('{"name": "run", "arguments": "1"}', '"arguments"'),
        ('{"name": "run", "arguments": "[1]"}', '"arguments" must be a JSON object'),
        ('{"name": "run", "arguments": "so"}', "must be a JSON object"),
        ('{"name": "run", "arguments": "{\\"a\\": 1}"}', ToolCall(name="run", arguments={"a": 1})),
        ('{"id": "x", "type": "function", "name": "run", "arguments": {}}', ToolCall(name="run", arguments={})),
        ('{"name": "run", "arguments": [1]}', '"arguments" must be a JSON object'),
        ('{"name": "run", "parameters": null}', '"arguments" must be a JSON object'),
        ('{"name": "run", "parameters": {"a": 1}}', ToolCall(name="run", arguments={"a": 1})),
        ('{"name": "run", "parameters": {}, "arguments": {"a": 1}}', 'alone, not ["parameters", "arguments"]'),
        ('{"name": "run", "argument": {"a": 1}}', 'alone, not ["argument"]'),
        ('{"name": "run", "a": 1}', 'alone, not ["a"]'),
        ('{"name": "run", "arguments": {"a": 1}, "arguments": {}}', "a key twice"),
        ('{"name": "run", "arguments": {"a": 1, "a": 2}}', "a key twice"),
        ('{"name": "run", "arguments": {"a": NaN}}', "NaN is no JSON"),
        ('{"name": "run", "arguments": {"a": 1e999}}', "1e999 is no JSON"),
        (
            '{"name": "run", "arguments": {"a": 12345678901234567890123}}',
            ToolCall(name="run", arguments={"a": 12345678901234567890123}),
        ),
        ("[" * 100_000, "not valid JSON"),
        ('{"name": ' + "1" * 5000 + "}", "not valid JSON"),
    ],
)
def test_a_json_call_is_read_or_its_error_is_named(content: str, expected: ToolCall | str) -> None:
    call = parse_json_call(content)
    if isinstance(expected, ToolCall):
        assert call == expected
    else:
        assert isinstance(call, MalformedCall)
        assert expected in call.error


@pytest.mark.parametrize("max_chars", [16, 17, 64, 255, 256])
def test_a_long_response_keeps_begin_and_end(max_chars: int) -> None:
    text = "".join(chr(ord("a") + i % 26) for i in range(1000))
    cut = cut_text(text, max_chars)
    assert len(cut) == max_chars
    assert cut[0] == text[0]
    assert cut[-1] == text[-1]
    assert "...(cut)..." in cut
    assert cut_text(text[:max_chars], max_chars) == text[:max_chars]
