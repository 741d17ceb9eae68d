"""The endpoint with OpenAI's client, over the torch engine with a tiny model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import openai
import pytest

from services.common.kept_tokens import unpack
from services.common.records import Purpose, Sampling
from services.common.text.chat import load_model
from services.common.weights.snapshot import named_weights
from services.inference.endpoint.server import EndpointServer
from services.inference.engine.base import FinishReason, GenerationRequest, WeightUpdate
from services.inference.rollouts import ServedPolicy
from tests.integration.inference.endpoint_peers import (
    ADD,
    POLICY,
    Recorded,
    asking,
    client_of,
    mismatches,
    play_tools,
    session_of,
    tiny_model,
    torch_policy,
)
from tests.random_models import perturbed
from tests.unit.inference.fakes import RecordingEngine, served_policy
from tests.waiting import until

USER = [{"role": "user", "content": "go"}]
CALL = 'I add. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


@pytest.fixture
async def policy() -> AsyncIterator[ServedPolicy]:
    async with torch_policy() as policy:
        yield policy


async def test_what_is_trained_is_what_was_sampled_over_concurrent_sessions(
    policy: ServedPolicy, server: EndpointServer
) -> None:
    engine: Any = policy.engine
    sessions = [session_of(policy, f"g/{i}/0", seed=i) for i in range(6)]

    async def play(index: int) -> None:
        async with asking(server, sessions[index]) as client:
            await play_tools(client, 6, question=f"question {index}")

    await asyncio.gather(*(play(i) for i in range(len(sessions))))
    assert len(engine.said) == 36
    for index, session in enumerate(sessions):
        mine = [(r, g) for r, g in engine.said if r.request_id.startswith(f"g/{index}/")]
        assert mismatches(mine, session) == 0
        (sequence,) = session.sequences(1.0)
        assert sequence.num_trained_tokens == sum(len(g.token_ids) for _, g in mine)


async def test_a_tool_loop_reads_calls_and_continues_from_the_sampled_ids(server: EndpointServer) -> None:
    policy = await served_policy([CALL, "It is 1."])
    engine = policy.engine
    assert isinstance(engine, RecordingEngine)
    session = session_of(policy, sampling=Sampling(max_new_tokens=200))
    async with asking(server, session) as client:
        first = await client.chat.completions.create(model="default", messages=USER, tools=[ADD])
        said = first.choices[0].message
        assert first.choices[0].finish_reason == "tool_calls"
        assert said.content == "I add."
        (call,) = said.tool_calls
        assert (call.function.name, call.function.arguments) == ("add", '{"a":1}')
        answer = {"role": "tool", "tool_call_id": call.id, "content": "1 <|im_end|>"}
        messages = [*USER, said.model_dump(exclude_none=True), answer]
        second = await client.chat.completions.create(model="default", messages=messages, tools=[ADD])
    assert second.choices[0].message.content == "It is 1."
    (sequence,) = session.sequences(1.0)
    prompt, follow = (list(r.prompt_ids) for r in engine.requests)
    sampled = engine.generations[0].token_ids
    assert follow[: len(prompt) + len(sampled)] == [*prompt, *sampled]
    assert follow.count(policy.chat.end_of_turn_id) == prompt.count(policy.chat.end_of_turn_id) + 2
    assert sequence.token_ids.tolist() == [*follow, *engine.generations[1].token_ids]


async def test_tool_choice_none_leaves_the_prompt_and_reads_no_calls(server: EndpointServer) -> None:
    session = session_of(await served_policy([CALL]), sampling=Sampling(max_new_tokens=200))
    async with asking(server, session) as client:
        answer = await client.chat.completions.create(model=POLICY, messages=USER, tools=[ADD], tool_choice="none")
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].message.content == CALL


async def test_a_stream_gives_what_a_whole_answer_gives(policy: ServedPolicy, server: EndpointServer) -> None:
    sampling = Sampling(max_new_tokens=120)  # a chunk has all tokens since the one before
    whole, streamed = (session_of(policy, name, seed=5, sampling=sampling) for name in ("g/0/0", "g/1/0"))
    with server.opened(whole) as a, server.opened(streamed) as b:
        async with client_of(server, a) as one, client_of(server, b) as two:
            answer = await one.chat.completions.create(model=POLICY, messages=USER, logprobs=True)
            stream = await two.chat.completions.create(
                model=POLICY, messages=USER, logprobs=True, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == answer.choices[0].message.content
    assert len(chunks) > 5
    assert chunks[-1].usage == answer.usage
    assert chunks[-2].choices[0].finish_reason == answer.choices[0].finish_reason
    told = answer.choices[0].logprobs.content
    streamed_logprobs = [entry.logprob for entry in chunks[-2].choices[0].logprobs.content]
    assert streamed_logprobs == pytest.approx([entry.logprob for entry in told], abs=1e-4)
    (sequence,) = streamed.sequences(1.0)
    sampled = [float(p) for s in sequence.segments if s.is_policy for p in s.logprobs]
    assert streamed_logprobs == sampled
    assert sequence.token_ids.tolist() == whole.sequences(1.0)[0].token_ids.tolist()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_ends_the_turn_in_the_engine_and_the_conversation_goes_on(
    policy: ServedPolicy, server: EndpointServer, stream: bool
) -> None:
    engine: Any = policy.engine
    budget = Sampling(max_new_tokens=400)
    async with asking(server, session_of(policy, seed=3, sampling=budget)) as client:
        free = await client.chat.completions.create(model=POLICY, messages=USER)
    text = free.choices[0].message.content
    stop = text[20:23]
    engine.said.clear()
    session = session_of(policy, seed=3, sampling=budget)
    async with asking(server, session) as client:
        if stream:
            parts = await client.chat.completions.create(model=POLICY, messages=USER, stop=stop, stream=True)
            said = "".join([part.choices[0].delta.content or "" async for part in parts])
        else:
            said = (
                (await client.chat.completions.create(model=POLICY, messages=USER, stop=[stop]))
                .choices[0]
                .message.content
            )
        assert said == text.partition(stop)[0]
        assert len(engine.said[0][1].token_ids) < 60  # the engine was stopped, not merely cut
        assert engine.said[0][1].finish_reason is FinishReason.STOP
        more = [*USER, {"role": "assistant", "content": said}, {"role": "user", "content": "more"}]
        await client.chat.completions.create(model=POLICY, messages=more, max_tokens=5)
    (sequence,) = session.sequences(1.0)
    assert len(sequence.segments) == 4
    assert mismatches(engine.said, session) == 0


async def test_a_rewritten_history_begins_another_sequence_or_is_refused(
    policy: ServedPolicy, server: EndpointServer
) -> None:
    engine: Any = policy.engine
    session = session_of(policy)
    async with asking(server, session) as client:
        messages = await play_tools(client, 2)
        messages[1] = {"role": "user", "content": "something else"}
        await client.chat.completions.create(model=POLICY, messages=messages, tools=[ADD])
    first, second = session.sequences(1.0)
    assert (first.thread, second.thread) == (0, 1) and first.attempt == second.attempt == 0
    assert [s.is_policy for s in second.segments] == [False, True]
    assert mismatches(engine.said, session) == 0
    strict = session_of(policy, "g/1/0", rewrites="refuse")
    async with asking(server, strict) as client:
        messages = await play_tools(client, 2)
        messages[1] = {"role": "user", "content": "something else"}
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model=POLICY, messages=messages, tools=[ADD])
    assert refused.value.code == "history_rewritten"
    assert len(strict.sequences(1.0)) == 1


async def test_a_client_that_leaves_aborts_its_generation_and_may_ask_again(
    policy: ServedPolicy, server: EndpointServer
) -> None:
    engine: Any = policy.engine
    session = session_of(policy, sampling=Sampling(max_new_tokens=8))
    async with asking(server, session) as client:
        messages = await play_tools(client, 1)
        await engine.release()  # requests wait
        asked = asyncio.create_task(client.chat.completions.create(model=POLICY, messages=messages, tools=[ADD]))
        await until(lambda: engine.health().waiting + engine.health().running, "the request to arrive")
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await until(lambda: not engine.health().waiting + engine.health().running, "the abort")
        await engine.restore(WeightUpdate.full(dict(named_weights(load_model(tiny_model(), "float32"))), 0))
        await client.chat.completions.create(model=POLICY, messages=messages, tools=[ADD])
    (sequence,) = session.sequences(1.0)
    assert [s.is_policy for s in sequence.segments] == [False, True, False, True]
    assert mismatches(engine.said, session) == 0


async def test_a_swap_in_mid_conversation_keeps_the_versions_of_all_tokens(
    policy: ServedPolicy, server: EndpointServer
) -> None:
    engine: Any = policy.engine
    weights = dict(named_weights(perturbed(load_model(tiny_model(), "float32"))))
    session = session_of(policy, sampling=Sampling(max_new_tokens=400, min_new_tokens=400))
    async with asking(server, session) as client:
        messages: list[Any] = [*USER]
        first = asyncio.create_task(client.chat.completions.create(model=POLICY, messages=messages))
        await until(lambda: engine.health().generated_tokens > 20, "the first tokens")
        await engine.update(WeightUpdate.full(weights, 1))
        messages += [(await first).choices[0].message.model_dump(exclude_none=True), *USER]
        await client.chat.completions.create(model=POLICY, messages=messages, max_tokens=5)
    (sequence,) = session.sequences(1.0)
    assert [s.weight_version for s in sequence.segments if s.is_policy] == [0, 1, 1]
    assert mismatches(engine.said, session) == 0


async def test_the_end_of_a_session_ends_its_requests(policy: ServedPolicy, server: EndpointServer) -> None:
    engine: Any = policy.engine
    await engine.release()  # requests wait
    with server.opened(session_of(policy)) as session_id:
        client = openai.AsyncOpenAI(base_url=server.base_url, api_key=session_id, max_retries=0)
        asked = asyncio.create_task(client.chat.completions.create(model=POLICY, messages=USER))
        await until(lambda: engine.health().waiting + engine.health().running, "the request to arrive")
    with pytest.raises(openai.AuthenticationError):
        await asked
    await client.close()


@pytest.mark.parametrize(("allowed", "temperature"), [(False, 1.0), (True, 0.5)])
async def test_a_clients_temperature_counts_only_where_it_may(
    server: EndpointServer, allowed: bool, temperature: float
) -> None:
    policy = await served_policy(["x"])
    engine = policy.engine
    assert isinstance(engine, RecordingEngine)
    async with asking(server, session_of(policy, client_sampling=allowed)) as client:
        await client.chat.completions.create(
            model=POLICY,
            messages=USER,
            temperature=0.5,
            seed=7,
            max_completion_tokens=4,
            extra_body={"top_k": -1 if allowed else 5, "min_p": 0.0 if allowed else 0.1},
        )
    request: GenerationRequest = engine.requests[0]
    assert request.sampling.temperature == temperature
    assert (request.sampling.top_k, request.sampling.min_p) == (0, 0.0)
    assert (request.seed == 7) is allowed
    assert request.sampling.max_new_tokens == 4


async def test_a_turn_says_what_a_client_sampled_it_with_where_that_is_not_the_runs_way(server: EndpointServer) -> None:
    """Defect 13 of the review: sampled at the client's temperature, trained at the recipe's."""
    run = Sampling(max_new_tokens=12, temperature=0.9, top_p=0.8)
    async with torch_policy() as policy:
        engine = policy.engine
        assert isinstance(engine, Recorded)
        session = session_of(policy, client_sampling=True, sampling=run)
        async with asking(server, session) as client:
            for asked in ({}, {"temperature": 0.5}, {"top_p": 1.0}, {"temperature": 0.9, "top_p": 0.3},
                          {"top_p": 1.0, "extra_body": {"top_k": 2}},
                          {"top_p": 1.0, "extra_body": {"min_p": 0.3}}):  # fmt: skip
                await client.chat.completions.create(
                    model=POLICY, messages=[{"role": "user", "content": f"say {len(engine.said)}"}], **asked
                )
        for (asked, generation), kept in zip(engine.said, session.sequences(1.0), strict=True):
            said = kept.segments[-1]
            used = run.temperature if said.temperature is None else said.temperature
            assert used == asked.sampling.temperature
            assert said.temperature is None or used != run.temperature
            sets = unpack(said.kept, said.token_ids)
            assert said.kept, "the run truncates, so each turn has its drawable tokens"
            from_everything = bool(sets.left_out.all()) and not len(sets.ids)
            assert from_everything == (not asked.sampling.is_truncated)
            assert not asked.sampling.top_k or np.bincount(sets.rows).max() <= asked.sampling.top_k
            assert generation.token_ids == said.token_ids.tolist()


async def test_a_client_that_takes_the_runs_truncation_back_keeps_what_min_new_tokens_left_out(
    server: EndpointServer,
) -> None:
    """Its first tokens were drawn without the stop tokens, and are trained over the same set; the others over everything."""
    async with torch_policy() as policy:
        run = Sampling(max_new_tokens=12, min_new_tokens=3, top_p=0.8)
        session = session_of(policy, client_sampling=True, sampling=run)
        async with asking(server, session) as client:
            await client.chat.completions.create(model=POLICY, messages=USER, top_p=1.0)
        (kept,) = session.sequences(1.0)
    (said,) = [segment for segment in kept.segments if segment.is_policy]
    sets = unpack(said.kept, said.token_ids)
    assert sets.left_out.all()
    assert sorted(set(sets.rows.tolist())) == [0, 1, 2], "each without the stop tokens"


@pytest.mark.parametrize("temperature", [0, 1e-8, 9e-7])
@pytest.mark.parametrize("purpose", Purpose)
async def test_a_greedy_turn_of_a_client_is_refused_where_it_would_be_trained(
    server: EndpointServer, purpose: Purpose, temperature: float
) -> None:
    """Also if a client sends a tiny number for 0: the orchestrator refuses a record with such a temperature."""
    session = session_of(await served_policy(["x"]), client_sampling=True, purpose=purpose)
    async with asking(server, session) as client:
        asked = client.chat.completions.create(model=POLICY, messages=USER, temperature=temperature)
        if purpose is Purpose.EVALUATION:
            assert (await asked).choices
            return
        with pytest.raises(openai.BadRequestError, match=f"temperature is {temperature:g}") as refused:
            await asked
    assert refused.value.param == "temperature"
    assert session.sequences(1.0) == ()
