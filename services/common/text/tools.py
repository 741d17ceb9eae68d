"""Checking a tool call's arguments against the tool's JSON schema, in words from which a model can correct itself.

A part of JSON Schema: ``type``, ``properties``, ``required``, ``additionalProperties`` (true or false; false when left
out), ``items``, ``enum``, ``const``, ``anyOf``, ``pattern`` and the bounds of numbers, texts and lists. A schema that
uses another keyword is refused at the registration of its tool, so that each keyword is checked.
"""

from __future__ import annotations

import contextlib
import difflib
import enum
import functools
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from pydantic_core import SchemaError, SchemaValidator, core_schema

from services.common.text.encodable import encodable
from services.common.text.thoughts import END_OF_THOUGHT, THOUGHT

_ANNOTATIONS = {"title", "description", "default", "examples", "$schema", "format"}
_TYPES: dict[str, tuple[str, tuple[type, ...]]] = {
    "string": ("a string", (str,)),
    "integer": ("an integer", (int,)),
    "number": ("a number", (int, float)),
    "boolean": ("true or false", (bool,)),
    "array": ("a list", (list,)),
    "object": ("an object", (dict,)),
    "null": ("null", (type(None),)),
}
_BOUNDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "minimum": ((int, float), "must be at least {}"),
    "maximum": ((int, float), "must be at most {}"),
    "exclusiveMinimum": ((int, float), "must be above {}"),
    "exclusiveMaximum": ((int, float), "must be below {}"),
    "minLength": (str, "must have at least {} characters"),
    "maxLength": (str, "must have at most {} characters"),
    "minItems": (list, "must have at least {} items"),
    "maxItems": (list, "must have at most {} items"),
}
_KNOWN = {
    "type",
    "properties",
    "required",
    "additionalProperties",
    "items",
    "enum",
    "const",
    "anyOf",
    "pattern",
    *_BOUNDS,
}
_MAX_SHOWN_CHARS = 60
_MAX_REASON_CHARS = 120


def check_schema(schema: Any, where: str = "parameters") -> None:
    """Raise ``ValueError`` for parts of a schema that are not checked or make no sense."""
    if not isinstance(schema, Mapping):
        raise ValueError(f"{where} must be an object of JSON Schema, not {schema!r}")
    for keyword in schema:
        if keyword not in _KNOWN | _ANNOTATIONS:
            raise ValueError(f"{where}.{keyword} is not checked here; there is {', '.join(sorted(_KNOWN))}")
    for name in _types(schema):
        if name not in _TYPES:
            raise ValueError(f"{where}.type is {name!r}; there is {', '.join(_TYPES)}")
    if "additionalProperties" in schema and not isinstance(schema["additionalProperties"], bool):
        raise ValueError(f"{where}.additionalProperties must be true or false")
    if "pattern" in schema:
        _pattern(str(schema["pattern"]), where)
    properties = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in properties:
            raise ValueError(f"{where}.required names {name!r}, which is none of its properties")
    for name, inner in properties.items():
        check_schema(inner, f"{where}.{name}")
    if "items" in schema:
        check_schema(schema["items"], f"{where}.items")
    for index, inner in enumerate(schema.get("anyOf", ())):
        check_schema(inner, f"{where}.anyOf[{index}]")


@functools.lru_cache(maxsize=1024)
def _pattern(pattern: str, where: str = "pattern") -> SchemaValidator:
    """Raises ``ValueError`` for a pattern that the engine, whose time is linear in the text, does not take."""
    try:
        return SchemaValidator(core_schema.str_schema(pattern=pattern))
    except SchemaError as error:
        why = " ".join(str(error).split())[-_MAX_REASON_CHARS:]
        raise ValueError(
            f"{where}.pattern {pattern!r} cannot be checked in linear time: write it without look-around, references "
            f"to groups and other features that Rust's regex lacks ({why})"
        ) from None


def problem_with(arguments: Any, schema: Mapping[str, Any]) -> str | None:
    """The error in the arguments of a call, or None.

    >>> schema = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
    >>> problem_with({"cod": "1"}, schema)
    "argument 'code' is missing; did you mean it by 'cod'?"
    >>> problem_with({"code": 1}, schema)
    "argument 'code' must be a string, not 1"
    """
    return _problem(arguments, schema, "")


def _problem(value: Any, schema: Mapping[str, Any], path: str) -> str | None:
    name = f"argument {path!r}" if path else "the arguments"
    kinds = _types(schema)
    if kinds and not any(_is(value, kind) for kind in kinds):
        return f"{name} must be {_joined(_TYPES[kind][0] for kind in kinds)}, not {_shown(value)}"
    if "const" in schema and not _same(value, schema["const"]):
        return f"{name} must be {_shown(schema['const'])}, not {_shown(value)}"
    if "enum" in schema and not any(_same(value, allowed) for allowed in schema["enum"]):
        return f"{name} must be {_joined(_shown(allowed) for allowed in schema['enum'])}, not {_shown(value)}"
    if isinstance(value, str) and "pattern" in schema and not _pattern(schema["pattern"]).isinstance_python(value):
        return f"{name} must match {schema['pattern']}, unlike {_shown(value)}"
    if "anyOf" in schema:
        problems = [_problem(value, option, path) for option in schema["anyOf"]]
        if all(problems):
            return str(problems[0])
    return _out_of_bounds(value, schema, name) or _inside(value, schema, path)


def _out_of_bounds(value: Any, schema: Mapping[str, Any], name: str) -> str | None:
    for keyword, (kinds, told) in _BOUNDS.items():
        if keyword not in schema or not isinstance(value, kinds) or isinstance(value, bool):
            continue
        bound = schema[keyword]
        size = value if isinstance(value, (int, float)) else len(value)  # type: ignore[arg-type]
        fine = {"m": size >= bound, "M": size <= bound, "e": size > bound, "E": size < bound}
        which = {"minimum": "m", "maximum": "M", "exclusiveMinimum": "e", "exclusiveMaximum": "E"}.get(
            keyword, "m" if keyword.startswith("min") else "M"
        )
        if not fine[which]:
            has = _shown(value) if size is value else f"{size}"
            return f"{name} {told.format(bound)}, not {has}"
    return None


def _inside(value: Any, schema: Mapping[str, Any], path: str) -> str | None:
    if isinstance(value, list) and "items" in schema:
        for index, item in enumerate(value):
            problem = _problem(item, schema["items"], f"{path}[{index}]")
            if problem is not None:
                return problem
    if not isinstance(value, Mapping) or ("properties" not in schema and "object" not in _types(schema)):
        return None
    properties: Mapping[str, Any] = schema.get("properties", {})
    unknown = [name for name in value if name not in properties and not schema.get("additionalProperties", False)]
    for name in schema.get("required", ()):
        if name not in value:
            alike = difflib.get_close_matches(name, unknown, n=1)
            hint = f"; did you mean it by {alike[0]!r}?" if alike else ""
            return f"argument {_below(path, name)!r} is missing{hint}"
    if unknown:
        known = ", ".join(repr(name) for name in properties) or "none"
        return f"unknown argument {_below(path, unknown[0][:_MAX_SHOWN_CHARS])!r}; there is {known}"
    for name, inner in properties.items():
        if name in value:
            problem = _problem(value[name], inner, _below(path, name))
            if problem is not None:
                return problem
    return None


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _types(schema: Mapping[str, Any]) -> list[str]:
    kinds = schema.get("type", [])
    return [kinds] if isinstance(kinds, str) else list(kinds)


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if isinstance(value, float) and not math.isfinite(value):
        return False  # JSON has no such number; Python's reader lets them in
    return isinstance(value, _TYPES[kind][1])


def _same(left: Any, right: Any) -> bool:
    return isinstance(left, bool) == isinstance(right, bool) and bool(left == right)


def _shown(value: Any) -> str:
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "an object"
    text = json.dumps(encodable(value), ensure_ascii=False)
    return text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + "..."


def _joined(options: Iterable[str]) -> str:
    return " or ".join(options)


# --- Tool calls as text: the Hermes calls of an assistant turn, and the status, text and counts of their results.


OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A tool call of a policy, parsed; the arguments are not checked against a schema yet."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class MalformedCall:
    """A call that cannot be parsed; ``error`` is the message for the policy."""

    error: str


def find_call(text: str) -> str | MalformedCall | None:
    """The text between the first pair of tags outside thoughts; None without a call."""
    begin, end = next(_places_of_calls(text), (0, 0))
    if end < 0:
        return MalformedCall(error="a tool_call tag is opened and not closed")
    return text[begin:end] if end else None


def split_calls(text: str, *, thinks: bool = False) -> tuple[str, list[str]]:
    """The text without its calls, and the text between each pair of tags. A tag that is not closed stays text, as do
    calls that a thought mentions. ``thinks``: the prompt ends within a thought.

    >>> split_calls("I look. <tool_call>a</tool_call><tool_call>b</tool_call>")
    ('I look. ', ['a', 'b'])
    >>> split_calls("<think>Not <tool_call>a</tool_call>.</think> 3")
    ('<think>Not <tool_call>a</tool_call>.</think> 3', [])
    """
    said: list[str] = []
    calls: list[str] = []
    place = 0
    for begin, end in _places_of_calls(text, thinks=thinks):
        if end >= 0:
            said.append(text[place : begin - len(OPEN)])
            calls.append(text[begin:end])
            place = end + len(CLOSE)
    return "".join([*said, text[place:]]), calls


_OPENING = re.compile(f"{THOUGHT}|{OPEN}")
_THOUGHT_TAG = re.compile(f"{THOUGHT}|{END_OF_THOUGHT}")
_JSON, _SPACE = re.compile(r"\s*+\{"), re.compile(r"\s*+")
_THOUGHT_TAG_OR_CALL = re.compile(f"{THOUGHT}|{END_OF_THOUGHT}|{OPEN}(?:(?!{OPEN}).)*?{CLOSE}", re.DOTALL)


def _places_of_calls(text: str, *, thinks: bool = False) -> Iterator[tuple[int, int]]:
    """Begin and end of the content of each call that stands outside thoughts. The last may lack its end, which is -1 then.

    An end of a thought without a beginning, outside complete calls, ends a thought that the prompt has begun.
    """
    tags = (found for found in _THOUGHT_TAG_OR_CALL.finditer(text) if not found.group().startswith(OPEN))
    first = next(tags, None)
    place = first.end() if first is not None and first.group() == END_OF_THOUGHT else 0
    if thinks and not place:
        place = text.find(END_OF_THOUGHT) + len(END_OF_THOUGHT)
        if place < len(END_OF_THOUGHT):
            return
    while found := _OPENING.search(text, place):
        begin, depth = found.end(), 1
        if found.group() == OPEN:
            end = _end_of_call(text, begin)
            later = text.rfind(OPEN, begin, end) + len(OPEN)
            if later > begin and _JSON.match(text, later) and not _JSON.match(text, begin):  # the tag was a quotation
                begin, end = later, _end_of_call(text, later)
            yield begin, end
            place = end + len(CLOSE)
        else:
            tags_inside = _THOUGHT_TAG.finditer(text, begin)
            end = next(
                (tag.start() for tag in tags_inside if not (depth := depth + (1 if tag[0] == THOUGHT else -1))), -1
            )
            place = end + len(END_OF_THOUGHT)
        if end < 0:
            return


def _end_of_call(text: str, begin: int) -> int:
    """The place of the closing tag; one in a text of the call's JSON closes no call."""
    try:
        inside = json.JSONDecoder().raw_decode(text, _SPACE.match(text, begin).end())[1]  # type: ignore[union-attr]
    except (ValueError, RecursionError):
        inside = begin
    return text.find(CLOSE, inside)


def parse_json_call(content: str) -> ToolCall | MalformedCall:
    """One JSON object ``{"name": ..., "arguments": {...}}``; ``parameters``, the word of Llama 3, is the same as ``arguments``.
    Arguments may be JSON as text, as in OpenAI's messages, and an ``id`` and a ``type`` may stand beside."""
    try:
        call = _loads(content)
    except ValueError as error:  # JSONDecodeError, and integers of absurd length
        return MalformedCall(error=f"not valid JSON: {error}")
    except RecursionError:
        return MalformedCall(error="not valid JSON: nested too deeply")
    if not isinstance(call, dict):
        return MalformedCall(error="the call must be one JSON object with name and arguments")
    if not isinstance(call.get("name"), str):
        return MalformedCall(error='"name" is missing or no string')
    others = [key for key in call if key not in ("name", "id", "type")]
    if others not in ([], *([each] for each in _ARGUMENTS)):
        return MalformedCall(error=f'write "name" and "arguments" alone, not {json.dumps(others)}')
    arguments = call[others[0]] if others else {}
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = _loads(arguments)
    if not isinstance(arguments, dict):
        return MalformedCall(error='"arguments" must be a JSON object')
    return ToolCall(name=call["name"], arguments=arguments)


_ARGUMENTS = ("arguments", "parameters")


def _loads(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_object, parse_constant=_no_json, parse_float=_finite)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("one object has a key twice")
    return made


def _no_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    return number if math.isfinite(number) else _no_json(digits)


Cut = Literal["start", "middle", "end"]
_MARK = " ...(cut)... "


def cut_text(text: str, max_chars: int, where: Cut = "middle") -> str:
    """At most ``max_chars`` characters of a text, cut at its start, in its middle or at its end.

    >>> cut_text("0123456789" * 3, 20), cut_text("0123456789" * 3, 20, "end"), cut_text("0123456789" * 3, 20, "start")
    ('0123 ...(cut)... 789', '0123456 ...(cut)... ', ' ...(cut)... 3456789')
    """
    if len(text) <= max_chars:
        return text
    room = max_chars - len(_MARK)
    if room < 2:
        return text[-max_chars:] if where == "start" else text[:max_chars]
    tail = {"start": room, "middle": room // 2, "end": 0}[where]
    return text[: room - tail] + _MARK + text[len(text) - tail :]


class ToolStatus(enum.StrEnum):
    """The words under which calls are counted (``tool_errors_<status>``)."""

    OK = "ok"
    PROGRAM_ERROR = "program_error"  # the code raised, crashed or was no code
    TIME_LIMIT = "time_limit"
    MEMORY_LIMIT = "memory_limit"
    OUTPUT_LIMIT = "output_limit"
    TOOL_ERROR = "tool_error"  # the tool reports that it cannot do the task
    MALFORMED_CALL = "malformed_call"  # no JSON object with name and arguments
    UNKNOWN_TOOL = "unknown_tool"
    INVALID_ARGUMENTS = "invalid_arguments"  # violates the tool's schema


# by the names that the gateway's ``RunStatus`` and the workflows' ``ProgramStatus`` share
_OF_PROGRAMS = {
    "OK": ToolStatus.OK,
    "RUNTIME_ERROR": ToolStatus.PROGRAM_ERROR,
    "COMPILE_ERROR": ToolStatus.PROGRAM_ERROR,
    "TIME_LIMIT": ToolStatus.TIME_LIMIT,
    "MEMORY_LIMIT": ToolStatus.MEMORY_LIMIT,
    "OUTPUT_LIMIT": ToolStatus.OUTPUT_LIMIT,
    "INVALID_REQUEST": ToolStatus.INVALID_ARGUMENTS,
}


def status_of_program(ended: enum.Enum) -> ToolStatus | None:
    """The status of a call that ran a program. None for a failure of the machinery, which is no answer."""
    return _OF_PROGRAMS.get(ended.name)


STATUS_METRIC = "tool_status_"
"""Prefix of the metric with the status of an episode's last call, which the gateway writes and the replica reads."""


def shown_output(status: ToolStatus, stdout: str, stderr: str = "", *, wall_s: float = 0.0, detail: str = "") -> str:
    """The text for a policy about code that was run: its output, then the error.

    >>> shown_output(ToolStatus.PROGRAM_ERROR, "so far\\n", "NameError: boom\\n")
    'so far\\nNameError: boom'
    """
    parts = [stdout.rstrip()]
    match status:
        case ToolStatus.OK:
            pass
        case ToolStatus.TIME_LIMIT:
            parts.append(f"TimeoutError: stopped after {wall_s:.1f} s")
        case ToolStatus.MEMORY_LIMIT:
            parts.append("MemoryError: the program used too much memory")
        case ToolStatus.OUTPUT_LIMIT:
            parts.append("Error: the program printed too much")
        case ToolStatus.INVALID_ARGUMENTS:
            parts.append(f"Error: {detail or 'the program cannot be run'}")
        case _:
            parts.append(stderr.rstrip() or "the program failed")
    return "\n".join(part for part in parts if part) or "(no output)"


class ToolStatistics:
    """The calls of one trajectory."""

    def __init__(self) -> None:
        self._kinds: Counter[str] = Counter()
        self._tools: Counter[str] = Counter()
        self._latency_s = 0.0
        self._longest_s = 0.0

    def count(self, kind: str, latency_s: float, tool: str = "") -> None:
        """One call that ended as ``kind``: ``ok``, or a countable word for its failure."""
        self._kinds[kind] += 1
        if tool:
            self._tools[tool] += 1
        self._latency_s += latency_s
        self._longest_s = max(self._longest_s, latency_s)

    def metrics(self) -> dict[str, float]:
        """``tool_calls``, ``tool_errors``, ``tool_errors_<kind>``, ``tool_calls_<tool>``, and seconds: their sum and the
        longest."""
        errors = {f"tool_errors_{kind}": float(n) for kind, n in self._kinds.items() if kind != ToolStatus.OK}
        return {
            "tool_calls": float(self._kinds.total()),
            "tool_errors": sum(errors.values()),
            "tool_latency_s": self._latency_s,
            "tool_latency_max_s": self._longest_s,
            **errors,
            **{f"tool_calls_{tool}": float(n) for tool, n in self._tools.items()},
        }
