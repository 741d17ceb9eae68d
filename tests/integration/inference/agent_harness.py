"""A scripted agent harness over HTTP with official clients: a lead agent, three subagents, parallel calls, two compactions.

    lead -> 3 subagents at once -> lead -> 2 calls at once from one history -> summary
                                       -> a new history from the summary -> summary -> a new history from that

The script goes on with every answer of the policy: calls of the policy are answered, otherwise texts take their place. A
``Speaker`` holds one conversation in one dialect, in the way of that dialect's agents: what the client returned goes back
into the history as it is.
"""

from __future__ import annotations

import asyncio
import copy
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

NUM_SUBAGENTS, NUM_COMPACTIONS = 3, 2
LEAD, RESEARCHER = "You lead. Delegate, then report.", "You research."
DELEGATE = {
    "name": "delegate",
    "description": "Give a task to a researcher.",
    "parameters": {"type": "object", "properties": {"brief": {"type": "string"}}, "required": ["brief"]},
}
SEARCH = {
    "name": "search",
    "description": "Search.",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
}


@dataclass(frozen=True, kw_only=True)
class Said:
    """``calls``: id, name and arguments."""

    text: str
    calls: tuple[tuple[str, str, Mapping[str, Any]], ...] = ()


class Speaker(ABC):
    """One conversation."""

    def __init__(self, client: Any, system: str, tool: Mapping[str, Any]) -> None:
        self.client = client
        self.system = system
        self.tool = tool
        self.history: list[Any] = []

    def forked(self) -> Speaker:
        fork = copy.copy(self)
        fork.history = list(self.history)
        return fork

    def renewed(self) -> Speaker:
        return type(self)(self.client, self.system, self.tool)

    @abstractmethod
    def hears(self, text: str) -> None: ...

    @abstractmethod
    def is_answered(self, results: Mapping[str, str]) -> None:
        """Results of tools by the ids of their calls."""

    @abstractmethod
    async def says(self, *, stream: bool = False) -> Said: ...


class ChatSpeaker(Speaker):
    def __init__(self, client: Any, system: str, tool: Mapping[str, Any]) -> None:
        super().__init__(client, system, tool)
        self.history.append({"role": "system", "content": system})

    def hears(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    def is_answered(self, results: Mapping[str, str]) -> None:
        self.history += [{"role": "tool", "tool_call_id": i, "content": text} for i, text in results.items()]

    async def says(self, *, stream: bool = False) -> Said:
        tools = [{"type": "function", "function": self.tool}]
        ask = {"model": "default", "messages": self.history, "tools": tools}
        if stream:
            told = await _joined(await self.client.chat.completions.create(**ask, stream=True))
        else:
            answer = await self.client.chat.completions.create(**ask)
            told = answer.choices[0].message.model_dump(exclude_none=True)
        self.history.append(told)
        calls = [
            (call["id"], call["function"]["name"], json.loads(call["function"]["arguments"]))
            for call in told.get("tool_calls", ())
        ]
        return Said(text=told.get("content") or "", calls=tuple(calls))


async def _joined(chunks: Any) -> dict[str, Any]:
    """The message of a stream."""
    text, calls = "", []
    async for chunk in chunks:
        delta = chunk.choices[0].delta
        text += delta.content or ""
        calls += [call.model_dump(exclude_none=True, exclude={"index"}) for call in delta.tool_calls or ()]
    return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}


class ResponsesSpeaker(Speaker):
    def hears(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    def is_answered(self, results: Mapping[str, str]) -> None:
        self.history += [{"type": "function_call_output", "call_id": i, "output": text} for i, text in results.items()]

    async def says(self, *, stream: bool = False) -> Said:
        ask = {
            "model": "default",
            "instructions": self.system,
            "input": self.history,
            "tools": [{"type": "function", "strict": False, **self.tool}],
        }
        answer = await self.client.responses.create(**ask, stream=stream)
        if stream:
            answer = [event async for event in answer][-1].response
        self.history += [item.to_dict() for item in answer.output]
        calls = [(i.call_id, i.name, json.loads(i.arguments)) for i in answer.output if i.type == "function_call"]
        return Said(text=answer.output_text, calls=tuple(calls))


class MessagesSpeaker(Speaker):
    def hears(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    def is_answered(self, results: Mapping[str, str]) -> None:
        blocks = [{"type": "tool_result", "tool_use_id": i, "content": text} for i, text in results.items()]
        self.history.append({"role": "user", "content": blocks})

    async def says(self, *, stream: bool = False) -> Said:
        tool = {
            "name": self.tool["name"],
            "description": self.tool["description"],
            "input_schema": self.tool["parameters"],
        }
        ask = {
            "model": "default",
            "system": self.system,
            "messages": self.history,
            "tools": [tool],
            "max_tokens": 4096,
        }
        if stream:
            async with self.client.messages.stream(**ask) as events:
                answer = await events.get_final_message()
        else:
            answer = await self.client.messages.create(**ask)
        self.history.append({"role": "assistant", "content": answer.content})
        text = "".join(block.text for block in answer.content if block.type == "text")
        calls = [(block.id, block.name, block.input) for block in answer.content if block.type == "tool_use"]
        return Said(text=text, calls=tuple(calls))


SPEAKERS: dict[str, type[Speaker]] = {"chat": ChatSpeaker, "responses": ResponsesSpeaker, "messages": MessagesSpeaker}


@asynccontextmanager
async def client_for(dialect: str, base_url: str, session: str, http_client: Any = None) -> AsyncIterator[Any]:
    """The official client of a dialect, with the session as its key."""
    settings = {"base_url": base_url, "api_key": session, "max_retries": 0, "http_client": http_client}
    if dialect == "messages":
        from anthropic import AsyncAnthropic as Client
    else:
        from openai import AsyncOpenAI as Client  # type: ignore[assignment]
    client = Client(**settings)
    try:
        yield client
    finally:
        if http_client is None:
            await client.close()


async def play(dialect: str, client: Any, goal: str, *, streams: Callable[[], bool] = lambda: False) -> Speaker:
    """The whole script; returns the lead's last conversation. ``streams`` says whether the next answer is streamed."""
    speaker = SPEAKERS[dialect]
    lead = speaker(client, LEAD, DELEGATE)
    lead.hears(goal)
    said = await lead.says(stream=streams())
    briefs = [str(arguments.get("brief", "")) for _, _, arguments in said.calls[:NUM_SUBAGENTS]]
    briefs += [f"{goal}: part {i} of {NUM_SUBAGENTS}" for i in range(len(briefs), NUM_SUBAGENTS)]
    async with asyncio.TaskGroup() as group:
        working = [
            group.create_task(_research(speaker(client, RESEARCHER, SEARCH), brief, streams)) for brief in briefs
        ]
    found = [each.result() for each in working]
    _answer(lead, said, found)
    await lead.says(stream=streams())
    lead.hears("Two proposals, please.")
    forks = [lead, lead.forked()]
    async with asyncio.TaskGroup() as group:
        for fork in forks:
            group.create_task(fork.says(stream=streams()))
    for _ in range(NUM_COMPACTIONS):
        lead.hears("Sum up the work so far.")
        summary = await lead.says(stream=streams())
        lead = lead.renewed()
        lead.hears(f"{goal}. So far: {summary.text} Go on.")
        for _ in range(2):
            _answer(lead, await lead.says(stream=streams()), [])
    return lead


async def _research(subagent: Speaker, brief: str, streams: Callable[[], bool]) -> str:
    subagent.hears(brief)
    _answer(subagent, await subagent.says(stream=streams()), [])
    return (await subagent.says(stream=streams())).text


def _answer(speaker: Speaker, said: Said, texts: list[str]) -> None:
    """Answer the calls of a turn, or say the same."""
    told = [*texts, *["nothing new"] * (len(said.calls) - len(texts))]
    if said.calls:
        speaker.is_answered({call_id: told[i] for i, (call_id, _, _) in enumerate(said.calls)})
    else:
        speaker.hears("\n".join(told) or "And then?")
