"""A harness with three subagents, parallel calls and two compactions: its sequences, their parents, and their tokens."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import aiohttp
import pytest

from services.common.records import Origin, Sampling, TokenSequence
from services.common.text.chat import Chat
from services.inference.endpoint.server import EndpointServer
from services.inference.engine.base import GenerationRequest
from tests.integration.inference.agent_harness import LEAD, play
from tests.integration.inference.endpoint_peers import asking, client_of, mismatches, session_of, torch_policy
from tests.unit.inference.fakes import qwen_like_chat, served_policy

USER: list[Any] = [{"role": "user", "content": "go"}]


def call(name: str, argument: str, value: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {{"{argument}": "{value}"}}}}</tool_call>'


def script(chat: Chat) -> Any:
    """The policy's text by its prompt: the lead delegates three parts and sums up; a researcher searches once."""
    delegation = "".join(call("delegate", "brief", f"Find out about part number {i}.") for i in range(3))

    def text(prompt: str) -> str:
        asked = prompt.rpartition("<|im_start|>user")[2]
        if LEAD not in prompt:
            return "Part found, in full." if "tool_response" in asked else call("search", "query", "part")
        if "Sum up" in asked:
            return f"The summary after {prompt.count('<|im_end|>')} messages."
        if "So far" in prompt or "tool_response" in prompt:
            return "I go on."
        return f"<think>\nThree parts.\n</think>\n\nI delegate. {delegation}"

    def reply(request: GenerationRequest) -> Sequence[int]:
        return [*chat.encode(text(chat.decode(request.prompt_ids))), chat.end_of_turn_id]

    return reply


def origins(sequences: Sequence[TokenSequence]) -> Counter[Origin]:
    return Counter(sequence.origin for sequence in sequences)


@pytest.mark.parametrize("stream", [False, True])
async def test_subagents_parallel_calls_and_compactions_are_sequences_with_parents(
    server: EndpointServer, stream: bool
) -> None:
    policy = await served_policy(script(qwen_like_chat()), context_length=4096)
    engine: Any = policy.engine
    session = session_of(policy, sampling=Sampling(max_new_tokens=400))
    async with asking(server, session) as client:
        await play(client, "Write the report", streams=lambda: stream)
    sequences = session.sequences(1.0)
    assert origins(sequences) == {Origin.ROOT: 1, Origin.SUBAGENT: 3, Origin.BRANCH: 1, Origin.COMPACTION: 2}
    lead, *subagents, branch, first, second = sequences
    assert lead.origin is Origin.ROOT and all(each.origin is Origin.SUBAGENT for each in subagents)
    assert [each.parent for each in (*subagents, branch)] == [0, 0, 0, 0]
    assert first.parent in (0, 4) and second.parent == 5
    prompt = branch.segments[0].token_ids.tolist()
    assert lead.token_ids.tolist()[: len(prompt) - 20] == prompt[: len(prompt) - 20], "the parent's ids, not its text"
    sampled = sum(len(generation.token_ids) for generation in engine.generations)
    assert sum(sequence.num_trained_tokens for sequence in sequences) == sampled


async def test_what_a_harness_trains_is_what_was_sampled(server: EndpointServer) -> None:
    async with torch_policy() as policy:
        engine: Any = policy.engine
        session = session_of(policy, sampling=Sampling(max_new_tokens=12))
        numbers = iter(range(1000))
        async with asking(server, session) as client:
            await play(client, "Write the report", streams=lambda: next(numbers) % 3 == 0)
        assert mismatches(engine.said, session) == 0
        sampled = sum(len(generation.token_ids) for _, generation in engine.said)
        assert sum(sequence.num_trained_tokens for sequence in session.sequences(0.0)) == sampled


async def test_a_history_that_is_cut_at_its_end_goes_on_from_the_ids_of_its_beginning(server: EndpointServer) -> None:
    async with torch_policy() as policy:
        engine: Any = policy.engine
        session = session_of(policy)
        async with asking(server, session) as client:
            messages = list(USER)
            for _ in range(3):
                answer = await client.chat.completions.create(model="default", messages=messages)
                messages += [answer.choices[0].message.model_dump(exclude_none=True), *USER]
            again = [*messages[:2], {"role": "user", "content": "another way"}]
            await client.chat.completions.create(model="default", messages=again)
        first, second = session.sequences(0.0)
        assert (second.origin, second.parent) == (Origin.BRANCH, 0)
        shared = [token for segment in first.segments[:2] for token in segment.token_ids.tolist()]
        assert second.segments[0].token_ids.tolist()[: len(shared)] == shared
        assert [segment.is_policy for segment in second.segments] == [False, True]
        assert mismatches(engine.said, session) == 0


async def test_rewards_are_posted_for_an_answers_sequence_or_for_the_rollout(server: EndpointServer) -> None:
    session = session_of(await served_policy(["x"]))
    with server.opened(session) as session_id:
        async with client_of(server, session_id) as client:
            for text in ("a", "b"):
                answer = await client.chat.completions.create(
                    model="default", messages=[{"role": "user", "content": text}]
                )
            async with aiohttp.ClientSession(headers={"X-Session-ID": session_id}) as http:

                async def post(**body: Any) -> int:
                    async with http.post(f"{server.base_url}/rewards", json=body) as told:
                        assert told.status == 200 or (await told.json())["error"]["message"]
                        return told.status

                assert await post(reward=0.25) == await post(id=answer.id, reward=0.5) == 200
                assert await post(id="chatcmpl-x", reward=1.0) == 404
                assert await post(reward="good") == await post(reward=None) == await post(rewards=1.0) == 400
                async with http.post(
                    f"{server.base_url}/rewards", data='{"reward": NaN}', headers={"Content-Type": "application/json"}
                ) as told:
                    assert told.status == 400
    assert session.reward == 0.25
    assert [sequence.reward for sequence in session.sequences(0.25)] == [0.25, 0.5]


async def test_one_text_sent_twice_at_once_after_equal_answers_does_not_grow_one_sequence(
    server: EndpointServer,
) -> None:
    """Both bodies begin with the text of the same earlier body, and the second finds an answer equal to the earlier one."""
    policy = await served_policy(["Yes."])
    engine: Any = policy.engine
    session = session_of(policy)
    async with asking(server, session) as client:
        messages = list(USER)
        for _ in range(2):
            ask = [client.chat.completions.create(model="default", messages=messages) for _ in range(4)]
            answer, *_ = await asyncio.gather(*ask)
            messages += [answer.choices[0].message.model_dump(exclude_none=True), *USER]
    asked = {request.prompt_ids for request in engine.requests}
    assert len(asked) == 2, "each request reads what its messages say"
    assert len(session.sequences(0.0)) >= 4
