"""A scripted agent harness over HTTP with OpenAI's client: a lead agent, three subagents, parallel calls, two compactions.

    lead -> 3 subagents at once -> lead -> 2 calls at once from one history -> summary
                                       -> a new history from the summary -> summary -> a new history from that

The script goes on with every answer of the policy: calls of the policy are answered, otherwise texts take their place.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable, Mapping
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


class Speaker:
    """One conversation; what the client returned goes back into its history as it is."""

    def __init__(self, client: Any, system: str, tool: Mapping[str, Any]) -> None:
        self.client = client
        self.system = system
        self.tool = tool
        self.history: list[Any] = [{"role": "system", "content": system}]

    def forked(self) -> Speaker:
        fork = copy.copy(self)
        fork.history = list(self.history)
        return fork

    def renewed(self) -> Speaker:
        return Speaker(self.client, self.system, self.tool)

    def hears(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    def is_answered(self, results: Mapping[str, str]) -> None:
        """Results of tools by the ids of their calls."""
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


async def play(client: Any, goal: str, *, streams: Callable[[], bool] = lambda: False) -> None:
    """The whole script. ``streams`` says whether the next answer is streamed."""
    lead = Speaker(client, LEAD, DELEGATE)
    lead.hears(goal)
    said = await lead.says(stream=streams())
    briefs = [str(arguments.get("brief", "")) for _, _, arguments in said.calls[:NUM_SUBAGENTS]]
    briefs += [f"{goal}: part {i} of {NUM_SUBAGENTS}" for i in range(len(briefs), NUM_SUBAGENTS)]
    async with asyncio.TaskGroup() as group:
        working = [
            group.create_task(_research(Speaker(client, RESEARCHER, SEARCH), brief, streams)) for brief in briefs
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
