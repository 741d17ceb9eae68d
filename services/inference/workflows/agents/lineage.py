"""Finds where a new conversation of an agent comes from: which earlier conversation of its rollout, and how.

    an answer of another at the same place of the history ------------> branch of the other
    an answer of another quoted, under the same system prompt ---------> compaction of the other
    begun with the arguments of a call that another waits for ---------> subagent of the other
    an answer of another quoted otherwise -----------------------------> subagent of the other
    another waits for a call ------------------------------------------> subagent of the other
    none of these -----------------------------------------------------> root

Requests of agents have no origin, only messages. So an origin is for people, metrics and rewards; the choice of trained
tokens does not depend on the origin. Pure functions of messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from services.common.records.types import Origin
from services.common.text.chat import Message
from services.inference.workflows.agents.chat_messages import same_message

QUOTED_CHARS = 12
"""Shorter answers and arguments stand in other texts by chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnMark:
    """The end of a turn: the number of messages and of segments up to and with the turn."""

    num_messages: int
    num_segments: int


class Ancestor(Protocol):
    """A conversation that has an answer."""

    @property
    def messages(self) -> Sequence[Message]: ...

    @property
    def marks(self) -> Sequence[TurnMark]: ...

    @property
    def tools_key(self) -> bytes: ...

    @property
    def parent(self) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """``at``: for a branch, the turn of the parent behind which it goes on."""

    origin: Origin = Origin.ROOT
    parent: Any = None
    at: TurnMark | None = None


def lineage_of(messages: Sequence[Message], tools_key: bytes, threads: Sequence[Ancestor]) -> Lineage:
    """``threads``: the latest one last."""
    latest_first = threads[::-1]
    shared = [(thread, mark) for thread in latest_first if (mark := _shared_turn(messages, thread))]
    if shared:
        parent, at = max(shared, key=lambda each: each[1].num_messages)
        return Lineage(origin=Origin.BRANCH, parent=parent, at=at)
    texts = [str(message["content"]) for message in messages]
    quoted = next((thread for thread in latest_first if _quotes(messages, texts, thread)), None)
    if quoted is not None and any(_same_frame(messages, tools_key, thread) for thread in _with_ancestors(quoted)):
        return Lineage(origin=Origin.COMPACTION, parent=quoted)
    waiting = [thread for thread in latest_first if thread.messages[-1].get("tool_calls")]
    asked = next((thread for thread in waiting if _passes_arguments(thread.messages[-1], texts)), None)
    caller = asked or quoted or next(iter(waiting), None)
    return Lineage() if caller is None else Lineage(origin=Origin.SUBAGENT, parent=caller)


def _shared_turn(messages: Sequence[Message], thread: Ancestor) -> TurnMark | None:
    """The last turn of a thread up to which its messages begin ``messages``."""
    found = None
    at = 0
    for mark in thread.marks:
        end = mark.num_messages
        if end > len(messages) or not all(map(same_message, thread.messages[at:end], messages[at:end])):
            break
        found, at = mark, end
    return found


def _quotes(messages: Sequence[Message], texts: Sequence[str], thread: Ancestor) -> bool:
    """Whether messages have an answer of a thread as their own, or its last answer within a text."""
    answers = [thread.messages[mark.num_messages - 1] for mark in thread.marks]
    calls = {call["id"] for answer in answers for call in answer.get("tool_calls", ())}
    for message in messages:
        if message.get("tool_call_id") in calls or any(c["id"] in calls for c in message.get("tool_calls", ())):
            return True
        if message["role"] == "assistant" and any(same_message(answer, message) for answer in answers):
            return True
    said = str(answers[-1].get("said", "")).strip()
    return len(said) >= QUOTED_CHARS and any(said in text for text in texts)


def _same_frame(messages: Sequence[Message], tools_key: bytes, thread: Ancestor) -> bool:
    return tools_key == thread.tools_key and _system_of(messages) == _system_of(thread.messages)


def _system_of(messages: Sequence[Message]) -> Any:
    return messages[0]["content"] if messages[0]["role"] == "system" else None


def _with_ancestors(thread: Ancestor) -> Iterator[Ancestor]:
    found: Ancestor | None = thread
    while found is not None:
        yield found
        found = found.parent


def _passes_arguments(answer: Message, texts: Sequence[str]) -> bool:
    """Whether one of the texts has a text among the arguments of the answer's calls."""
    return any(
        len(value) >= QUOTED_CHARS and any(value in text for text in texts)
        for call in answer["tool_calls"]
        for value in _texts_in(_json(call["arguments"]))
    )


def _json(text: str) -> Any:
    try:
        return orjson.loads(text)
    except ValueError:
        return None


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value.strip()
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts_in(inner)
