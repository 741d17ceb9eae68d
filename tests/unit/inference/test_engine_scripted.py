"""The scripted engine: deterministic content and time, and no torch."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from services.common.errors import ConfigError, InvalidRequestError
from services.inference.engine.base import FinishReason, GenerationRequest
from services.inference.engine.scripted import RandomTokens, ScriptedEngine
from tests.random_models import make_prompt, make_request


def echo(request: GenerationRequest) -> list[int]:
    return [*request.prompt_ids, 2]


async def started(*args: object, **settings: object) -> ScriptedEngine:
    engine = ScriptedEngine(*args, **settings)  # type: ignore[arg-type]
    await engine.start()
    return engine


@pytest.mark.parametrize("script", [echo, f"{__name__}:echo"])
async def test_a_script_is_a_function_or_its_path(script: object) -> None:
    engine = await started(script)
    generation = await engine.generate(make_request([5, 6, 7], stop=(2,), max_new_tokens=10))
    assert generation.token_ids == [5, 6, 7, 2]
    assert generation.finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    "script",
    ["nowhere.at.all", "services.common.records:nothing", "plain", "services.common.records:__doc__"],
)
def test_a_script_that_cannot_be_imported_is_named(script: str) -> None:
    with pytest.raises(ConfigError, match=script):
        ScriptedEngine(script)


async def test_a_script_is_cut_at_stop_token_and_budget() -> None:
    engine = await started(lambda request: [1, 2, 3, 2, 4, 5])
    cut = await engine.generate(make_request([0], stop=(2,), max_new_tokens=10))
    assert cut.token_ids == [1, 2]
    later = await engine.generate(make_request([0], stop=(2,), min_new_tokens=2, max_new_tokens=10))
    assert later.token_ids == [1, 2, 3, 2]
    short = await engine.generate(make_request([0], max_new_tokens=4))
    assert (short.token_ids, short.finish_reason) == ([1, 2, 3, 2], FinishReason.LENGTH)


async def test_truncated_sampling_that_would_be_trained_is_refused() -> None:
    engine = await started(lambda request: [1, 2, 3])
    for cut in ({"top_p": 0.9}, {"top_k": 4}, {"min_p": 0.1}):
        request = make_request([0], max_new_tokens=2, **cut)
        with pytest.raises(InvalidRequestError, match="does not tell which tokens"):
            await engine.generate(request)
        assert (await engine.generate(replace(request, record_kept=False))).token_ids == [1, 2]


async def test_the_same_request_gives_the_same_tokens_and_logprobs_in_another_engine() -> None:
    results = []
    for _ in range(2):
        engine = await started(RandomTokens(seed=3))
        results.append(await engine.generate(make_request(make_prompt(9), stop=(1,), seed=5, max_new_tokens=2000)))
    assert results[0].token_ids == results[1].token_ids
    assert np.array_equal(results[0].segments[0].logprobs, results[1].segments[0].logprobs)
    assert results[0].token_ids[-1] == 1
    assert results[0].token_ids.count(1) == 1
    other = await engine.generate(make_request(make_prompt(9), stop=(1,), seed=6, max_new_tokens=2000))
    assert other.token_ids != results[0].token_ids


async def test_tokens_take_the_configured_time() -> None:
    engine = await started(lambda request: [1] * 50, tokens_per_second=500, latency_s=0.05)
    begun = time.monotonic()
    generation = await engine.generate(make_request([0], max_new_tokens=100))
    assert time.monotonic() - begun >= 0.15
    assert len(generation.token_ids) == 50
