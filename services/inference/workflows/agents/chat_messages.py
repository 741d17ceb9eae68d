"""The internal form of an external agent's messages and answers, the same for every dialect of requests.

A plain message has ``role`` and ``content`` (text), and if they apply ``tool_calls`` and ``tool_call_id``. ``content`` is
the text for the chat template: of an assistant its thought too, in tags. A dialect that sends thoughts apart from the text
adds ``said``, the text without the thought, and ``thought``, which its clients may leave out of later requests.

Pure functions of text and JSON.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from services.common.text.chat import Message
from services.common.text.thoughts import END_OF_THOUGHT, THOUGHT, split_thought
from services.common.text.tool_calls import CLOSE, OPEN, MalformedCall, parse_json_call, split_calls


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of a tool. ``arguments`` is JSON as text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The policy's text of one turn, for agents. ``content`` has the thought, ``said`` has not; neither has the calls."""

    content: str
    said: str
    thought: str = ""
    calls: tuple[Call, ...] = ()

    def message(self) -> Message:
        return assistant_message(self.content, self.calls) | {"said": self.said, "thought": self.thought}


def assistant_message(content: str, calls: Sequence[Call] = ()) -> dict[str, Any]:
    """A plain message of the assistant. Agents keep its text with or without surrounding space, so it has none."""
    told = [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in calls]
    return {"role": "assistant", "content": content.strip(), **({"tool_calls": told} if told else {})}


def apart_message(said: str, thought: str | None, calls: Sequence[Call] = ()) -> dict[str, Any]:
    """A plain message of the assistant from a dialect that has the thought apart; None where the client left it out."""
    said = said.strip()
    content = f"{THOUGHT}\n{thought}\n{END_OF_THOUGHT}\n\n{said}" if thought else said
    return {**assistant_message(content, calls), "said": said, **({} if thought is None else {"thought": thought})}


def tool_message(call_id: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": call_id}


def written_arguments(arguments: Any) -> str:
    """JSON as text, without spaces; its integers have any size, unlike orjson's."""
    return json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))


def plain_arguments(arguments: str) -> str:
    """The arguments of a call without spaces between their parts, so that spaces make no difference."""
    try:
        return written_arguments(json.loads(arguments))
    except (ValueError, RecursionError):
        return arguments  # then compared unchanged


def read_answer(text: str, *, with_calls: bool, thinks: bool) -> Answer:
    """The policy's text as an answer. If a call cannot be parsed, the whole text stays text.

    ``thinks``: the prompt ends within a thought.
    """
    calls: tuple[Call, ...] = ()
    if with_calls:
        without, contents = split_calls(text, thinks=thinks)
        calls = _calls(contents)
        text = without.strip() if calls else text
    thought, said = split_thought(text, thinks=thinks)
    return Answer(content=text, said=said, thought=thought, calls=calls)


def _calls(contents: Sequence[str]) -> tuple[Call, ...]:
    calls = []
    for content in contents:
        parsed = parse_json_call(content)
        if isinstance(parsed, MalformedCall):
            return ()
        try:
            (arguments := written_arguments(parsed.arguments)).encode()
        except UnicodeEncodeError:  # half of a surrogate pair: nothing that clients can read
            return ()
        calls.append(Call(id=f"call_{uuid.uuid4().hex[:24]}", name=parsed.name, arguments=arguments))
    return tuple(calls)


def shown_to_template(message: Message) -> Message:
    """Role and text alone: the calls of an assistant are written into its text, as policies write them."""
    calls = [
        f'{OPEN}\n{{"name": {orjson.dumps(call["name"]).decode()}, "arguments": {call["arguments"]}}}\n{CLOSE}'
        for call in message.get("tool_calls", ())
    ]
    text = "\n".join([message["content"], *calls] if message["content"] else calls) if calls else message["content"]
    return {"role": message["role"], "content": text}


def same_message(ours: Message, theirs: Message) -> bool:
    """Whether a message of a request is one that the session has. A thought that the client left out is no difference."""
    if ours == theirs:
        return True
    if not ours["role"] == theirs["role"] == "assistant" or ours.get("tool_calls") != theirs.get("tool_calls"):
        return False
    if "said" not in theirs:
        return bool(ours["content"] == theirs["content"])
    thought = ours.get("thought")
    return bool(ours.get("said") == theirs["said"] and theirs.get("thought", thought) == thought)


def same_messages(ours: Sequence[Message], theirs: Sequence[Message]) -> bool:
    return len(ours) == len(theirs) and all(map(same_message, ours, theirs))
