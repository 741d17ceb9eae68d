"""What every engine promises, run against each of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from services.common.errors import (
    InfrastructureError,
    InvalidRequestError,
    ModelMismatchError,
    PromptTooLongError,
)
from services.common.weights.codec import ChunkChange
from services.inference.engine.base import Engine, FinishReason, Generation, GenerationRequest
from services.inference.engine.scripted import RandomTokens, ScriptedEngine
from services.inference.engine.weight_update import WeightUpdate

from .conftest import VOCAB, build_model, make_prompt, make_request

CONTEXT = 600
OF_FLOATS: dict[str, Any] = {"dtype": "float32", "complete": False}


class Shape:
    def __init__(self, *shape: int) -> None:
        self.shape = shape


def with_words_to_say(engine: Any) -> Any:
    """A forced engine for tests that do not care what is said: requests without words get more than their budget."""
    generate = engine.generate

    async def forced(request: GenerationRequest) -> Generation:
        return await generate(replace(request, forced_ids=tuple(make_prompt(CONTEXT, seed=5))))

    engine.generate = forced
    return engine


@pytest.fixture(params=["torch", "forced", "scripted"])
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
    built: Any
    if request.param == "torch":
        pytest.importorskip("torch")
        from services.inference.engine.torch_engine import TorchEngine

        built = TorchEngine(build_model("qwen3"), num_slots=2, context_length=CONTEXT)
    elif request.param == "forced":
        pytest.importorskip("torch")
        from services.inference.engine.forced import ForcedEngine

        built = with_words_to_say(ForcedEngine(build_model("qwen3"), num_slots=2, context_length=CONTEXT))
    else:
        script = RandomTokens(vocab_size=VOCAB, median_length=2000, sigma=0)
        shapes = {"model.norm.weight": Shape(64)}
        built = ScriptedEngine(script, num_slots=2, context_length=CONTEXT, tokens_per_second=2000, shapes=shapes)
    await built.start()
    yield built
    await built.stop()


def weights_of(engine: Any) -> dict[str, Any]:
    return (
        dict(engine._shapes)
        if isinstance(engine, ScriptedEngine)
        else {k: v.clone() for k, v in engine._core.decoder.weights.items()}
    )


def one_change(position: int) -> ChunkChange:
    return ChunkChange(start=0, positions=np.array([position]), values=np.zeros(1, np.uint32), num_changes=1)


async def until_tokens(engine: Engine, count: int) -> None:
    async with asyncio.timeout(20):
        while engine.health().generated_tokens < count:
            await asyncio.sleep(0.001)


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


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 50])
async def test_a_prompt_that_fills_the_context_is_refused_with_the_numbers(engine: Engine, length: int) -> None:
    with pytest.raises(PromptTooLongError, match=f"{length}.*{CONTEXT}"):
        await engine.generate(make_request(make_prompt(length), max_new_tokens=1))
    assert engine.health().running == 0


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
    requests = [make_request(make_prompt(10, i), max_new_tokens=550) for i in range(3)]
    pending = [asyncio.ensure_future(engine.generate(r)) for r in requests]
    await until_tokens(engine, 2)
    assert engine.health().waiting == 1
    await engine.abort(requests[2].request_id)
    assert (await pending[2]).segments == ()
    assert (await pending[2]).finish_reason is FinishReason.ABORTED
    assert not pending[0].done()


async def test_abort_of_an_unknown_request_does_nothing(engine: Engine) -> None:
    await engine.abort("nobody")


async def test_cancelling_the_task_frees_the_slot(engine: Engine) -> None:
    pending = [
        asyncio.ensure_future(engine.generate(make_request(make_prompt(10), max_new_tokens=580))) for _ in range(3)
    ]
    await until_tokens(engine, 5)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    async with asyncio.timeout(20):
        while engine.health().running or engine.health().waiting:
            await asyncio.sleep(0.001)
    assert engine.health().free_slots == 2


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


async def test_an_update_splits_segments_and_keeps_the_budget(engine: Engine) -> None:
    pending = asyncio.ensure_future(engine.generate(make_request(make_prompt(10), max_new_tokens=500)))
    await until_tokens(engine, 10)
    assert await engine.update(WeightUpdate.full(weights_of(engine), 7)) >= 0
    generation = await pending
    assert [s.weight_version for s in generation.segments] == [0, 7]
    assert all(s.num_tokens for s in generation.segments)
    assert len(generation.token_ids) == 500
    assert engine.version == 7


async def test_an_update_of_other_weights_is_refused(engine: Engine) -> None:
    weights = weights_of(engine)
    weights["model.norm.weight"] = Shape(65)
    with pytest.raises(ModelMismatchError, match=r"model\.norm\.weight has shape \(65,\), the model \(64,\)"):
        await engine.update(WeightUpdate.full(weights, 1))
    with pytest.raises(ModelMismatchError, match="missing: model"):
        await engine.update(WeightUpdate.full({}, 1))
    assert engine.version == 0


async def test_an_update_of_some_weights_leaves_the_others(engine: Engine) -> None:
    some = {"model.norm.weight": weights_of(engine)["model.norm.weight"]}
    await engine.update(WeightUpdate(version=1, whole=some, complete=False))
    await engine.update(WeightUpdate(version=2, changes={"model.norm.weight": [one_change(63)]}, **OF_FLOATS))
    assert engine.version == 2


async def test_changes_that_the_model_has_no_room_for_are_refused(engine: Engine) -> None:
    for name, position in (("model.norm.weight", 64), ("model.abnorm.weight", 0)):
        with pytest.raises(ModelMismatchError, match="norm"):
            await engine.update(WeightUpdate(version=1, changes={name: [one_change(position)]}, **OF_FLOATS))
    assert engine.version == 0


async def test_more_requests_than_slots_all_finish(engine: Engine) -> None:
    generations = await asyncio.gather(
        *(engine.generate(make_request(make_prompt(10, i), max_new_tokens=5 + i)) for i in range(20))
    )
    assert [len(g.token_ids) for g in generations] == [5 + i for i in range(20)]


async def test_a_request_id_in_use_is_refused(engine: Engine) -> None:
    request = make_request(make_prompt(10), max_new_tokens=500)
    pending = asyncio.ensure_future(engine.generate(request))
    await until_tokens(engine, 1)
    with pytest.raises(InvalidRequestError, match=request.request_id):
        await engine.generate(request)
    await engine.abort(request.request_id)
    await pending


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


async def test_stop_fails_what_is_running(engine: Engine) -> None:
    pending = asyncio.ensure_future(engine.generate(make_request(make_prompt(10), max_new_tokens=580)))
    await until_tokens(engine, 1)
    await engine.stop()
    with pytest.raises(InfrastructureError, match="stopped"):
        await pending
    assert not engine.health().ok
    with pytest.raises(InfrastructureError, match="stopped"):
        await engine.generate(make_request([1, 2]))


async def test_a_crash_of_the_torch_thread_fails_all_that_wait() -> None:
    pytest.importorskip("torch")
    from services.inference.engine.torch_engine import TorchEngine

    def explode(num_tokens: int, when: float) -> None:
        raise OSError("the disk is gone")

    engine = TorchEngine(build_model("qwen3"), num_slots=1, context_length=64, on_tokens=explode)
    await engine.start()
    pending = [asyncio.ensure_future(engine.generate(make_request([1, 2, 3], max_new_tokens=9))) for _ in range(3)]
    for outcome in await asyncio.gather(*pending, return_exceptions=True):
        assert isinstance(outcome, InfrastructureError)
        assert "the disk is gone" in outcome.message
    assert not engine.health().ok
    assert "the disk is gone" in engine.health().detail
    with pytest.raises(InfrastructureError, match="disk"):
        await engine.pause()
    await engine.stop()
