r"""``tool_use``, ``tool_math`` and agents over the endpoint: one tool call, where the prompt lists tools, then the answer.

A tool that runs Python computes the answer. Any other tool, of an MCP server or of the recipe's own modules, is taken from
the list in the prompt and called with arguments that its schema asks for. One call in four fails on purpose, so that
penalties for failed calls differ within a group.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from services.inference.scripts.answers import answer, value, written
from services.inference.scripts.base import Cue
from services.inference.scripts.words import reasoning

_FAILING_SHARE = 0.25


def call_and_answer(cue: Cue) -> str:
    right = cue.is_right()
    final = answer(cue, right=right)  # also of a first turn: a row without a reference is refused at once
    if not cue.said and getattr(cue.settings, "max_turns", 2) > 1 and (call := _call(cue, right)) is not None:
        return f"{reasoning(cue)}<tool_call>{call}</tool_call>"
    tag = getattr(cue.settings, "answer_tag", "")
    return reasoning(cue) + f"<{tag}>{written(cue, value(cue, right=right))}</{tag}>" if tag else final


def _code(cue: Cue, text: str) -> str:
    return "print(1 // 0)" if _fails(cue) else f"print({text})" if text.isdigit() else f"print({text!r})"


def _fails(cue: Cue) -> bool:
    """Never for an agent's own tools: the agent may trust their schema."""
    return hasattr(cue.settings, "tools") and cue.random("failing").random() < _FAILING_SHARE


def _call(cue: Cue, right: bool) -> str | None:
    """The text between the tags; None if the prompt lists no tool. Settings of other workflows name no tools."""
    tools = getattr(cue.settings, "tools", ())
    code = _code(cue, value(cue, right=right)) if "answer" in cue.task.data else "print(1)"
    if getattr(cue.settings, "format", "") == "code":
        return code
    if "python_code_with_standard_io" in tools:
        arguments = {"code": code, "input": ""}
        return json.dumps({"name": "python_code_with_standard_io", "arguments": arguments})
    if "jupyter_code" in tools:
        return json.dumps({"name": "jupyter_code", "arguments": {"code": code}})
    listed = _listed(cue.prompt)
    if not listed:
        return None
    tool = cue.random("tool").choice(listed)
    arguments = {} if _fails(cue) else _arguments(tool.get("parameters", {}))
    return json.dumps({"name": tool["name"], "arguments": arguments})


def _listed(prompt: str) -> list[Mapping[str, Any]]:
    """The functions between ``<tools>`` and ``</tools>``, one JSON object in each line."""
    _, _, rest = prompt.partition("<tools>")
    found: list[Mapping[str, Any]] = []
    for line in rest.partition("</tools>")[0].splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        function = entry.get("function", entry) if isinstance(entry, dict) else None
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            found.append(function)
    return found


def _arguments(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A value for each argument that the schema requires: the first choice, or a plain value of its type."""
    properties = schema.get("properties", {})
    return {name: _value(properties.get(name, {})) for name in schema.get("required", properties)}


def _value(schema: Mapping[str, Any]) -> Any:
    if "const" in schema or schema.get("enum"):
        return schema["const"] if "const" in schema else schema["enum"][0]
    kind = schema.get("type", "string")
    if kind == "object":
        return _arguments(schema)
    return {"integer": 1, "number": 1.5, "boolean": True, "array": [], "null": None}.get(str(kind), "text")
