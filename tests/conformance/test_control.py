"""Interruptions of every engine: abort, cancel, pause."""

from __future__ import annotations

import asyncio

import pytest

from services.inference.engine.base import Engine, FinishReason
from tests.conformance.subjects import NUM_SLOTS, until_idle, until_tokens, until_waiting
from tests.random_models import make_prompt, make_request

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_abort_returns_what_there_is(engine: Engine) -> None:
    request = make_request(make_prompt(10), max_new_tokens=550)
    pending = asyncio.ensure_future(engine.generate(request))
    await until_tokens(engine, 5)
    await engine.abort(request.request_id)
    generation = await pending
    assert generation.finish_reason is FinishReason.ABORTED
    assert 5 <= len(generation.token_ids) < 550
    assert engine.health().running == 0


async def test_abort_of_a_waiting_request_returns_nothing(engine: Engine) -> None:
    requests = [make_request(make_prompt(10, i), max_new_tokens=550) for i in range(NUM_SLOTS + 1)]
    pending = [asyncio.ensure_future(engine.generate(r)) for r in requests]
    await until_tokens(engine, 2)
    await until_waiting(engine, 1)
    await engine.abort(requests[-1].request_id)
    assert (await pending[-1]).segments == ()
    assert (await pending[-1]).finish_reason is FinishReason.ABORTED
    assert not pending[0].done()


async def test_abort_of_an_unknown_request_does_nothing(engine: Engine) -> None:
    await engine.abort("nobody")


async def test_abort_while_paused_ends_the_request_when_it_resumes_at_the_latest(engine: Engine) -> None:
    requests = [make_request(make_prompt(10, i), max_new_tokens=400) for i in range(NUM_SLOTS)]
    pending = [asyncio.ensure_future(engine.generate(r)) for r in requests]
    await until_tokens(engine, 5)
    await engine.pause()
    await engine.abort(requests[0].request_id)
    await engine.resume()
    aborted, whole = await asyncio.gather(*pending)
    assert aborted.finish_reason is FinishReason.ABORTED
    assert len(aborted.token_ids) < 400
    assert len(whole.token_ids) == 400


async def test_cancelling_the_task_frees_the_slot(engine: Engine) -> None:
    pending = [
        asyncio.ensure_future(engine.generate(make_request(make_prompt(10), max_new_tokens=580))) for _ in range(3)
    ]
    await until_tokens(engine, 5)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    await until_idle(engine)
    assert engine.health().free_slots == NUM_SLOTS


async def test_pause_stops_tokens_and_resume_goes_on(engine: Engine) -> None:
    pending = asyncio.ensure_future(engine.generate(make_request(make_prompt(10), max_new_tokens=400)))
    await until_tokens(engine, 5)
    await engine.pause()
    standing = engine.health().generated_tokens
    joined = asyncio.ensure_future(engine.generate(make_request(make_prompt(10), max_new_tokens=10)))
    await asyncio.sleep(0.05)
    assert engine.health().generated_tokens == standing
    assert not pending.done()
    assert not joined.done()
    await engine.resume()
    assert len((await pending).token_ids) == 400
    assert len((await joined).token_ids) == 10


async def test_a_pause_leaves_the_version_and_the_segment_as_they_are(engine: Engine) -> None:
    pending = asyncio.ensure_future(engine.generate(make_request(make_prompt(10), max_new_tokens=300)))
    await until_tokens(engine, 5)
    await engine.pause()
    await engine.resume()
    generation = await pending
    assert [(s.weight_version, s.num_tokens, s.mixed_cache) for s in generation.segments] == [(0, 300, False)]
