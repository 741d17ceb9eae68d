"""OpenAI's Responses over the endpoint, with OpenAI's client; every body and event is validated by its types."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from services.common.records import Sampling
from services.inference.endpoint.server import EndpointServer
from tests.integration.inference.endpoint_peers import asking, client_of, session_of
from tests.unit.inference.fakes import served_policy

ADD: dict[str, Any] = {
    "type": "function",
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    "strict": False,
}
TURN = '<think>\nI should add.\n</think>\n\nI add. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
ROOM = Sampling(max_new_tokens=200)


def kinds(response: Any) -> list[str]:
    return [item.type for item in response.output]


@pytest.mark.parametrize("keeps", ["all", "no reasoning", "previous_response_id"])
async def test_a_tool_loop_is_one_sequence_however_the_client_returns_the_answer(
    server: EndpointServer, keeps: str
) -> None:
    policy = await served_policy([TURN, "It is 1."])
    session = session_of(policy, sampling=ROOM)
    items: list[Any] = [{"role": "user", "content": "go"}]
    async with asking(server, session) as client:
        common: dict[str, Any] = {"model": "default", "instructions": "Be brief.", "tools": [ADD]}
        first = await client.responses.create(input="go" if "previous" in keeps else items, **common)
        Response.model_validate(first.to_dict())
        assert kinds(first) == ["reasoning", "message", "function_call"]
        assert first.output[0].content[0].text == "I should add."
        assert first.output_text == "I add."
        call = first.output[-1]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "1"}
        if keeps == "previous_response_id":
            second = await client.responses.create(input=[result], previous_response_id=first.id, **common)
        else:
            items += [item.to_dict() for item in first.output if keeps == "all" or item.type != "reasoning"]
            second = await client.responses.create(input=[*items, result], **common)
    assert second.output_text == "It is 1." and second.status == "completed"
    (sequence,) = session.sequences(1.0)
    assert [s.is_policy for s in sequence.segments] == [False, True, False, True]


async def test_the_events_are_those_of_the_protocol_in_its_order(server: EndpointServer) -> None:
    session = session_of(await served_policy([TURN]), sampling=ROOM)
    async with asking(server, session) as client:
        stream = await client.responses.create(model="default", input="go", tools=[ADD], stream=True)
        events = [event async for event in stream]
    for event in events:
        TypeAdapter(ResponseStreamEvent).validate_python(event.to_dict())
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type.removeprefix("response.") for event in events]
    seen = [name for i, name in enumerate(names) if name != names[i - 1]]

    def text(kind: str) -> list[str]:
        return ["output_item.added", "content_part.added", f"{kind}.delta", f"{kind}.done", "content_part.done"]

    assert seen == [
        "created", "in_progress",
        *text("reasoning_text"), "output_item.done",
        *text("output_text"), "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    final = events[-1].response
    assert kinds(final) == ["reasoning", "message", "function_call"] and final.output_text == "I add."
    added = [event.item.id for event in events if event.type == "response.output_item.added"]
    assert added == [item.id for item in final.output]


async def test_tokens_are_counted_as_they_will_be_read(server: EndpointServer) -> None:
    session = session_of(await served_policy(["Yes."]))
    async with asking(server, session) as client:
        items: list[Any] = [{"role": "user", "content": "go"}]
        for _ in range(2):
            counted = await client.responses.input_tokens.count(model="default", input=items, tools=[ADD])
            answer = await client.responses.create(model="default", input=items, tools=[ADD])
            assert counted.input_tokens == answer.usage.input_tokens
            items += [*[item.to_dict() for item in answer.output], {"role": "user", "content": "more"}]
    assert len(session.sequences(0.0)) == 1


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_response_can_be_fetched_by_its_id_within_its_session(server: EndpointServer, streamed: bool) -> None:
    policy = await served_policy([TURN, "Yes."])
    session, other = session_of(policy, sampling=ROOM), session_of(policy, sampling=ROOM)
    with server.opened(session) as session_id, server.opened(other) as other_id:
        async with client_of(server, session_id) as client, client_of(server, other_id) as stranger:
            made = await client.responses.create(model="default", input="go", tools=[ADD], stream=streamed)
            if streamed:
                events = [event async for event in made]
                made = events[-1].response
            fetched = await client.responses.retrieve(made.id)
            assert fetched.to_dict() == made.to_dict() and kinds(fetched) == ["reasoning", "message", "function_call"]
            with pytest.raises(openai.NotFoundError, match="no response"):
                await stranger.responses.retrieve(made.id)
            kept = await client.responses.create(model="default", input="again", store=False)
            with pytest.raises(openai.NotFoundError, match="store: false"):
                await client.responses.retrieve(kept.id)
    assert len(session.sequences(0.0)) == 2, "fetching trains nothing"
