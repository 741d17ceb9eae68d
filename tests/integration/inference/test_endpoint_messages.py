"""Anthropic's Messages over the endpoint, with Anthropic's client; every body and event is validated by its types."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest
from pydantic import TypeAdapter

from services.common.records import Sampling
from services.inference.endpoint.server import EndpointServer
from tests.integration.inference.endpoint_peers import anthropic_of, asking_anthropic, session_of
from tests.unit.inference.fakes import served_policy

pytestmark = pytest.mark.needs("anthropic")

ADD: dict[str, Any] = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
TURN = '<think>\nI should add.\n</think>\n\nI add. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
GO: list[Any] = [{"role": "user", "content": "go"}]
ROOM = Sampling(max_new_tokens=200)
ASK: dict[str, Any] = {"model": "default", "max_tokens": 100}


def result(call_id: str, content: Any, *more: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call_id, "content": content}, *more]}


@pytest.mark.parametrize("keeps_thinking", [True, False])
async def test_a_tool_loop_is_one_sequence_with_or_without_the_returned_thinking(
    server: EndpointServer, keeps_thinking: bool
) -> None:
    from anthropic.types import Message

    session = session_of(await served_policy([TURN, "It is 1."]), sampling=ROOM)
    async with asking_anthropic(server, session) as client:
        ask = {**ASK, "system": [{"type": "text", "text": "Be brief."}], "tools": [ADD]}
        first = await client.messages.create(messages=GO, **ask)
        Message.model_validate(first.to_dict())
        assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
        assert (first.content[0].thinking, first.content[1].text) == ("I should add.", "I add.")
        assert (first.content[2].name, first.content[2].input) == ("add", {"a": 1})
        assert first.stop_reason == "tool_use"
        kept = [block for block in first.content if keeps_thinking or block.type != "thinking"]
        answer = result(first.content[2].id, [{"type": "text", "text": "1"}], {"type": "text", "text": "and?"})
        second = await client.messages.create(messages=[*GO, {"role": "assistant", "content": kept}, answer], **ask)
    assert second.content[0].text == "It is 1." and second.stop_reason == "end_turn"
    (sequence,) = session.sequences(1.0)
    assert [s.is_policy for s in sequence.segments] == [False, True, False, True]


async def test_the_events_are_those_of_the_protocol_in_its_order(server: EndpointServer) -> None:
    from anthropic.types import RawMessageStreamEvent

    session = session_of(await served_policy([TURN]), sampling=ROOM)
    with server.opened(session) as session_id:
        async with anthropic_of(server, session_id) as client:
            stream = await client.messages.create(messages=GO, tools=[ADD], stream=True, **ASK)
            events = [event async for event in stream]
            raw = {"model": "default", "max_tokens": 9, "messages": GO, "stream": True}
            async with aiohttp.ClientSession(headers={"X-Api-Key": session_id}) as http:
                async with http.post(f"{server.base_url}/messages", json=raw) as answer:
                    lines = (await answer.text()).splitlines()
    for event in events:
        TypeAdapter(RawMessageStreamEvent).validate_python(event.to_dict())
    told = [(e.type, e.delta.type if e.type == "content_block_delta" else None) for e in events]
    assert [each for i, each in enumerate(told) if each != told[i - 1]] == [
        ("message_start", None),
        ("content_block_start", None),
        ("content_block_delta", "thinking_delta"),
        ("content_block_delta", "signature_delta"),
        ("content_block_stop", None),
        ("content_block_start", None),
        ("content_block_delta", "text_delta"),
        ("content_block_stop", None),
        ("content_block_start", None),
        ("content_block_delta", "input_json_delta"),
        ("content_block_stop", None),
        ("message_delta", None),
        ("message_stop", None),
    ]
    assert [line for line in lines if line.startswith("event:")][:2] == ["event: message_start", "event: ping"]


async def test_another_system_prompt_behind_the_messages_is_another_conversation(server: EndpointServer) -> None:
    """The client writes ``system`` behind ``messages``, where the text that was read before does not show it."""
    session = session_of(await served_policy(["Yes."]))
    async with asking_anthropic(server, session) as client:
        said = await client.messages.create(messages=GO, system="Be brief.", **ASK)
        more = [*GO, {"role": "assistant", "content": said.content}, *GO]
        await client.messages.create(messages=more, system="Be long.", **ASK)
        await client.messages.create(messages=more, system="Be brief.", **ASK)
        await client.messages.create(messages=more, **ASK)
    assert len(session.sequences(0.0)) == 3


async def test_tokens_are_counted_as_they_will_be_read(server: EndpointServer) -> None:
    session = session_of(await served_policy(["Yes."]))
    messages = list(GO)
    async with asking_anthropic(server, session) as client:
        for _ in range(2):
            counted = await client.messages.count_tokens(model="default", messages=messages, system="x")
            answer = await client.messages.create(messages=messages, system="x", **ASK)
            assert counted.input_tokens == answer.usage.input_tokens
            messages += [{"role": "assistant", "content": answer.content}, *GO]
        assert [model.id async for model in client.models.list()] == ["model0"]
        assert (await client.models.retrieve("model0")).display_name == "model0"
    assert len(session.sequences(0.0)) == 1


async def test_a_stop_sequence_is_told(server: EndpointServer) -> None:
    session = session_of(await served_policy(["one two three"]), sampling=ROOM)
    async with asking_anthropic(server, session) as client:
        answer = await client.messages.create(messages=GO, stop_sequences=["thr", "two"], **ASK)
    assert (answer.stop_reason, answer.stop_sequence, answer.content[0].text) == ("stop_sequence", "two", "one")
