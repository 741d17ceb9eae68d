"""Tool calls as texts: the schemas of arguments, the calls in an assistant turn, and the texts of results.

Arguments are checked by JSON Schema 2020-12. No document is fetched: references point inside the schema. jsonschema is
imported on use.
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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from pydantic_core import SchemaError, SchemaValidator, core_schema

from services.common.text.thoughts import END_OF_THOUGHT, THOUGHT

_MAX_SHOWN_CHARS = 200
_MAX_NAME_CHARS = 60
_MAX_REASON_CHARS = 120


class ArgumentSchema:
    """The schema of one tool's arguments, known to be valid."""

    def __init__(self, schema: Any, where: str = "parameters", *, is_closed: bool = True) -> None:
        """``is_closed``: an argument that the schema does not name is wrong unless the schema says otherwise, a pattern must
        be one of linear time, and each required argument must be described.

        Raises:
            ValueError: the schema is invalid; names the wrong part.
        """
        from jsonschema import Draft202012Validator
        from jsonschema.exceptions import SchemaError
        from referencing import Registry

        if not isinstance(schema, Mapping) or schema.get("type") != "object":
            raise ValueError(f"{where} must be a JSON Schema of `type: object`, not {str(schema)[:60]}")
        try:
            Draft202012Validator.check_schema(schema)
        except SchemaError as error:
            raise ValueError(f"{where}{error.json_path[1:]}: {error.message[:_MAX_SHOWN_CHARS]}") from None
        except RecursionError:
            raise ValueError(f"{where} is nested too deeply") from None
        self._check_references(schema, where)
        if is_closed:
            _check_closed(schema, where)
        # An empty registry, without a way to retrieve: a reference to an address would be fetched otherwise.
        self._validator = _validator_class(is_closed)(dict(schema), registry=Registry())
        try:
            self.problem_with({})
        except RecursionError:
            raise ValueError(f"{where} refers to itself without end") from None

    def problem_with(self, arguments: Any) -> str | None:
        """The error in the arguments of a call, in words for the policy; None when they match.

        >>> schema = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
        >>> ArgumentSchema(schema).problem_with({"cod": "1"})
        "argument 'code' is missing; did you mean it by 'cod'?"
        >>> ArgumentSchema(schema).problem_with({"code": 1})
        "argument 'code': 1 is not of type 'string'"
        """
        from jsonschema.exceptions import best_match, by_relevance

        error = best_match(
            self._validator.iter_errors(arguments), key=by_relevance(weak={"anyOf", "oneOf", "properties"})
        )
        if error is None:
            return None
        path = error.json_path[1:].removeprefix(".")
        if error.validator in ("required", "properties"):  # of ours, which name the argument
            return f"{'in ' * bool(path)}{path}{': ' * bool(path)}{cut_text(error.message, _MAX_SHOWN_CHARS)}"
        return f"{f'argument {path!r}' if path else 'the arguments'}: {cut_text(error.message, _MAX_SHOWN_CHARS)}"

    def _check_references(self, schema: Mapping[str, Any], where: str) -> None:
        from referencing import Registry
        from referencing.exceptions import Unresolvable
        from referencing.jsonschema import DRAFT202012

        resolver = Registry().resolver_with_root(DRAFT202012.create_resource(schema))
        for _, part in _parts(schema, where):
            for reference in (part[key] for key in ("$ref", "$dynamicRef") if key in part):
                if not isinstance(reference, str) or not reference.startswith("#"):
                    raise ValueError(
                        f"{where} refers to {reference!r}: only references inside the schema (#/...) are followed"
                    )
                try:
                    resolver.lookup(reference)
                except Unresolvable:
                    raise ValueError(f"{where} refers to {reference}, which it does not have") from None


def _parts(part: Any, where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """All objects in a schema, each with its place."""
    if isinstance(part, Mapping):
        yield where, part
        for key, value in part.items():
            yield from _parts(value, where if key == "properties" else f"{where}.{key}")
    elif isinstance(part, list):
        for index, value in enumerate(part):
            yield from _parts(value, f"{where}[{index}]")


def _check_closed(schema: Mapping[str, Any], where: str) -> None:
    for name in schema.get("required", ()):
        if name not in schema.get("properties", {}):
            raise ValueError(f"{where}.required names {name!r}, which is none of its properties")
    for place, part in _parts(schema, where):
        if isinstance(pattern := part.get("pattern"), str):
            try:
                _linear(pattern)
            except SchemaError as error:
                why = " ".join(str(error).split())[-_MAX_REASON_CHARS:]
                raise ValueError(
                    f"{place}.pattern {pattern!r} cannot be checked in linear time: write it without look-around, references "
                    f"to groups and other features that Rust's regex lacks ({why})"
                ) from None


@functools.lru_cache(maxsize=1024)
def _linear(pattern: str) -> SchemaValidator:
    """Raises ``SchemaError`` for a pattern that the engine, whose time is linear in the text, does not take."""
    return SchemaValidator(core_schema.str_schema(pattern=pattern))


@functools.lru_cache
def _validator_class(is_closed: bool) -> Any:
    """Of JSON Schema 2020-12, but 1.0 is no integer and a missing argument may get a hint."""
    from jsonschema import Draft202012Validator, ValidationError
    from jsonschema.validators import extend

    def required(_: Any, names: list[str], instance: Any, schema: Mapping[str, Any]) -> Iterator[ValidationError]:
        for name in names if isinstance(instance, dict) else ():
            if name not in instance:
                unknown = [other for other in instance if other not in schema.get("properties", {})]
                alike = difflib.get_close_matches(name, unknown, n=1)
                hint = f"; did you mean it by {alike[0]!r}?" if alike else ""
                yield ValidationError(f"argument {name!r} is missing{hint}")

    def properties(validator: Any, known: Any, instance: Any, schema: Mapping[str, Any]) -> Iterator[ValidationError]:
        yield from Draft202012Validator.VALIDATORS["properties"](validator, known, instance, schema)
        if isinstance(instance, dict) and not schema.keys() & {"additionalProperties", "patternProperties"}:
            there_is = ", ".join(map(repr, known)) or "none"
            for name in instance:
                if name not in known:
                    yield ValidationError(f"unknown argument {name[:_MAX_NAME_CHARS]!r}; there is {there_is}")

    def pattern(_: Any, wanted: str, instance: Any, schema: Mapping[str, Any]) -> Iterator[ValidationError]:
        if isinstance(instance, str) and not _linear(wanted).isinstance_python(instance):
            yield ValidationError(f"{instance!r} does not match {wanted!r}")

    keywords = {"required": required, **({"properties": properties, "pattern": pattern} if is_closed else {})}
    types = Draft202012Validator.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int)
    return extend(Draft202012Validator, keywords, type_checker=types)


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


_MARK = " ...(cut)... "


def cut_text(text: str, max_chars: int, where: Literal["middle", "end"] = "middle") -> str:
    """At most ``max_chars`` characters of a text, cut in its middle or at its end.

    >>> cut_text("0123456789" * 3, 20), cut_text("0123456789" * 3, 20, "end")
    ('0123 ...(cut)... 789', '0123456 ...(cut)... ')
    """
    if len(text) <= max_chars:
        return text
    room = max_chars - len(_MARK)
    if room < 2:
        return text[:max_chars]
    tail = room // 2 if where == "middle" else 0
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
