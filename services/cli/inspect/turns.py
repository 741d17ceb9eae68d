"""Splits the tokens of a sequence into turns with roles, as people read a conversation.

The marks of a chat template (``<|im_start|>user`` and alike) are found by rendering a short dialogue of known texts. The marks
split only text that the policy read; text that the policy wrote is one turn, also with imitated marks. Independent of
terminals.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

POLICY, PROMPT, ENVIRONMENT = "policy", "prompt", "environment"
"""Roles of turns for which the template has no role; ``POLICY`` of all text that a policy wrote."""

_USER, _ASSISTANT, _AGAIN, _OTHER = "@@user@@", "@@assistant@@", "@@again@@", "@@other@@"


@dataclass(frozen=True, slots=True)
class Turn:
    role: str
    text: str


@dataclass(frozen=True, slots=True)
class Marks:
    """The text that a chat template writes around the turns of each role."""

    headers: Mapping[str, str]  # by role; none is empty
    ends: tuple[str, ...]  # longest first


def marks_of(tokenizer: Any) -> Marks:
    """The marks of a tokenizer's chat template; none without a template, or where it refuses a dialogue."""
    user, assistant, again = (_message("user", _USER), _message("assistant", _ASSISTANT), _message("user", _AGAIN))
    whole = _rendered(tokenizer, [user, assistant, again])
    if not all(mark in whole for mark in (_USER, _ASSISTANT, _AGAIN)):
        return Marks({}, ())
    before, rest = whole.split(_USER, 1)
    between, rest = rest.split(_ASSISTANT, 1)
    back, end_of_user = rest.split(_AGAIN, 1)
    header_of_user = _common_suffix(before, back)
    end_of_assistant = back.removesuffix(header_of_user)
    end_of_user = _common_prefix(between, end_of_user)
    headers = {"user": header_of_user, "assistant": between.removeprefix(end_of_user)}
    ends = {end_of_user, end_of_assistant}
    with_system = _rendered(tokenizer, [_message("system", _OTHER), user])
    if _OTHER in with_system and _USER in with_system:
        headers["system"], rest = with_system.split(_OTHER, 1)
        ends.add(rest.split(_USER, 1)[0].removesuffix(header_of_user))
    with_tool = _rendered(tokenizer, [user, assistant, _message("tool", _OTHER)])
    if _ASSISTANT in with_tool and _OTHER in with_tool:
        after, rest = with_tool.split(_ASSISTANT, 1)[1].split(_OTHER, 1)
        headers["tool"] = after.removeprefix(end_of_assistant)
        ends.add(rest)
    found = tuple(sorted({end.strip() for end in ends if end.strip()}, key=len, reverse=True))
    # A template that adds a system turn has its end before the first user: a policy writes that end itself.
    known = {role: _after_ends(header.strip(), found) for role, header in headers.items()}
    return Marks({role: header for role, header in known.items() if header}, found)


def turns(segments: Iterable[tuple[bool, str]], marks: Marks) -> list[Turn]:
    """The turns of a sequence. ``segments``: in order, whether the policy wrote the segment, and its decoded text; consecutive ones
    of one writer are joined."""
    found: list[Turn] = []
    for number, (by_policy, text) in enumerate(_joined(segments)):
        if by_policy:
            found.append(Turn(POLICY, _without_ends(text, marks)))
        else:
            found += read_turns(text, marks, PROMPT if number == 0 else ENVIRONMENT)
    return [turn for turn in found if turn.text or turn.role == POLICY]


def _joined(segments: Iterable[tuple[bool, str]]) -> Iterable[tuple[bool, str]]:
    for by_policy, parts in groupby(segments, key=itemgetter(0)):
        yield by_policy, "".join(text for _, text in parts)


def read_turns(text: str, marks: Marks, default: str) -> list[Turn]:
    """Turns of text that the policy read. The header of the answer at its end is no turn."""
    found: list[Turn] = []
    role, rest = default, text
    while True:
        at, follower = _next_header(rest, marks.headers)
        if follower is None:
            break
        found.append(Turn(role, _without_ends(rest[:at], marks)))
        role, rest = follower, rest[at + len(marks.headers[follower]) :]
    found.append(Turn(role, _without_ends(rest, marks)))
    return found


def _next_header(text: str, headers: Mapping[str, str]) -> tuple[int, str | None]:
    """The first header, the longest of those that begin there."""
    places = [(text.find(header), -len(header), role) for role, header in headers.items() if header in text]
    if not places:
        return len(text), None
    at, _, role = min(places)
    return at, role


def _after_ends(header: str, ends: Sequence[str]) -> str:
    end = next((end for end in ends if header.startswith(end)), "")
    return header.removeprefix(end).lstrip()


def _without_ends(text: str, marks: Marks) -> str:
    text = text.strip()
    while end := next((end for end in marks.ends if text.endswith(end)), ""):
        text = text.removesuffix(end).rstrip()
    while end := next((end for end in marks.ends if text.startswith(end)), ""):
        text = text.removeprefix(end).lstrip()
    return text


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _rendered(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> str:
    """Empty without a template, or if the template refuses these messages."""
    from jinja2 import TemplateError

    if not getattr(tokenizer, "chat_template", None):
        return ""
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=False))
    except (TemplateError, ValueError, KeyError, TypeError):  # as templates do for roles that they do not know
        return ""


def _common_prefix(one: str, other: str) -> str:
    length = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:length]


def _common_suffix(one: str, other: str) -> str:
    return _common_prefix(one[::-1], other[::-1])[::-1]
