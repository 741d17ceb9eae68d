"""One request on every engine: budget, context, stop tokens, callbacks, refusals."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from services.common.errors import InfrastructureError, InvalidRequestError, PromptTooLongError
from services.inference.engine.base import Engine, FinishReason
from tests.conformance.subjects import CONTEXT, Subject, until_idle, until_tokens
from tests.random_models import VOCAB, make_prompt, make_request

pytestmark = pytest.mark.asyncio(loop_scope="session")

MOST = tuple(range(0, VOCAB - 1, 2))  # as stop tokens half of the vocabulary: a generation of any engine meets one soon


async def test_budget_ends_a_request_with_length(engine: Engine) -> None:
    generation = await engine.generate(make_request(make_prompt(10), max_new_tokens=17))
    assert len(generation.token_ids) == 17
    assert generation.finish_reason is FinishReason.LENGTH
    assert len(generation.segments) == 1
    assert generation.segments[0].weight_version == 0
    assert (generation.segments[0].logprobs < 0).all()


async def test_the_context_ends_a_request_with_length(engine: Engine) -> None:
    generation = await engine.generate(make_request(make_prompt(CONTEXT - 5), max_new_tokens=100))
    assert len(generation.token_ids) == 5
    assert generation.finish_reason is FinishReason.LENGTH


async def test_a_stop_token_ends_a_request_and_is_its_last_token(engine: Engine) -> None:
    generation = await engine.generate(make_request(make_prompt(10), stop=MOST, max_new_tokens=400))
    *before, last = generation.token_ids
    assert generation.finish_reason is FinishReason.STOP
    assert last in MOST
    assert not set(before) & set(MOST)
    assert sum(segment.num_tokens for segment in generation.segments) == len(generation.token_ids)


async def test_without_stop_tokens_nothing_but_the_budget_ends_a_request(engine: Engine) -> None:
    """Not even the end-of-text token of the model's own configuration."""
    generation = await engine.generate(make_request(make_prompt(10), max_new_tokens=500))
    assert len(generation.token_ids) == 500


async def test_whoever_watches_is_told_each_token_and_ends_the_generation(subject: Subject) -> None:
    told: list[int] = []

    def watch(token: int) -> bool:
        told.append(token)
        return len(told) == 7

    request = replace(make_request(make_prompt(10), max_new_tokens=30), watch=watch)
    generation = await subject.engine.generate(request)
    assert len(generation.token_ids) == (7 if subject.watches else 30)
    assert told == (generation.token_ids if subject.watches else [])
    assert subject.engine.health().running == 0


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 50])
async def test_a_prompt_that_fills_the_context_is_refused_with_the_numbers(engine: Engine, length: int) -> None:
    with pytest.raises(PromptTooLongError, match=f"{length}.*{CONTEXT}"):
        await engine.generate(make_request(make_prompt(length), max_new_tokens=1))
    assert engine.health().running == 0


@pytest.mark.parametrize(
    ("prompt", "sampling", "complaint"),
    [
        ([], {}, "empty"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens"),
        ([1], {"top_p": 0.0}, "top_p"),
        ([1], {"temperature": -1.0}, "temperature"),
    ],
)
async def test_requests_that_make_no_sense_are_refused(
    engine: Engine, prompt: list[int], sampling: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(InvalidRequestError, match=complaint):
        await engine.generate(make_request(prompt, **sampling))


async def test_tokens_that_the_model_has_not_are_refused_and_harm_nobody(exact: Subject) -> None:
    for prompt, stop in (([1, VOCAB], ()), ([1], (VOCAB,)), ([-1], ())):
        with pytest.raises(InvalidRequestError, match="outside"):
            await exact.engine.generate(make_request(prompt, stop=stop, max_new_tokens=4))
    assert len((await exact.engine.generate(make_request([1], max_new_tokens=4))).token_ids) == 4


async def test_a_request_id_in_use_is_refused(engine: Engine) -> None:
    request = make_request(make_prompt(10), max_new_tokens=500)
    pending = asyncio.ensure_future(engine.generate(request))
    await until_tokens(engine, 1)
    with pytest.raises(InvalidRequestError, match=request.request_id):
        await engine.generate(request)
    pending.cancel()
    await asyncio.wait([pending])


async def test_more_requests_than_slots_all_finish(engine: Engine) -> None:
    generations = await asyncio.gather(
        *(engine.generate(make_request(make_prompt(10, i), max_new_tokens=5 + i)) for i in range(20))
    )
    assert [len(g.token_ids) for g in generations] == [5 + i for i in range(20)]


async def test_cancelling_the_task_frees_the_slot(engine: Engine) -> None:
    pending = [
        asyncio.ensure_future(engine.generate(make_request(make_prompt(10), max_new_tokens=580))) for _ in range(3)
    ]
    await until_tokens(engine, 5)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    await until_idle(engine)


# -- Waiting calls fail when an engine is stopped.


async def test_stop_fails_what_is_running(engine: Engine) -> None:
    pending = asyncio.ensure_future(engine.generate(make_request(make_prompt(10), max_new_tokens=580)))
    await until_tokens(engine, 1)
    await engine.stop()
    with pytest.raises(InfrastructureError, match="stopped"):
        await pending
    assert not engine.health().ok
    with pytest.raises(InfrastructureError, match="stopped"):
        await engine.generate(make_request([1, 2]))
