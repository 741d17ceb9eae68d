"""The base class of users' engines: budgets, versions and faults, over a stream that the test holds step by step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.common.errors import ConfigError, InfrastructureError, InvalidRequestError, PromptTooLongError
from services.common.records import Sampling
from services.inference.engine.base import FinishReason, GenerationRequest, WeightUpdate
from services.inference.engine.streaming import EngineSetup, StreamingEngine
from tests.waiting import until

STOP = 9


class Counting(StreamingEngine):
    """Emits 1, 2, 3, ...; each step waits until the test allows the step."""

    def __init__(self, setup: EngineSetup) -> None:
        super().__init__(setup)
        self.allowed = asyncio.Semaphore(0)
        self.loaded: list[int] = []

    async def tokens(self, request: GenerationRequest) -> AsyncIterator[tuple[int, float]]:
        for number in range(1, 20):
            await self.allowed.acquire()
            yield number, -0.5

    async def load(self, update: WeightUpdate) -> None:
        assert not self._stepping, "weights changed within a step"
        self.loaded.append(update.version)


async def started(kind: type[Counting] = Counting, free: int = 100, **settings: Any) -> Counting:
    engine = kind(EngineSetup(**{"policy": "model0", "context_length": 64, "num_slots": 2, **settings}))
    await engine.start()
    for _ in range(free):
        engine.allowed.release()
    return engine


def request(name: str = "a", *, prompt: int = 3, watch: Any = None, **sampling: Any) -> GenerationRequest:
    return GenerationRequest(
        request_id=name, prompt_ids=(1,) * prompt, sampling=Sampling(**sampling), stop_token_ids=(STOP,), watch=watch
    )


@pytest.mark.parametrize(
    ("asked", "tokens", "reason"),
    [
        (request(), list(range(1, 10)), FinishReason.STOP),
        (request(max_new_tokens=4), [1, 2, 3, 4], FinishReason.LENGTH),
        (request(prompt=60), [1, 2, 3, 4], FinishReason.LENGTH),
        (request(min_new_tokens=9), list(range(1, 20)), FinishReason.LENGTH),  # the stream ends
        (request(watch=lambda token: token == 3), [1, 2, 3], FinishReason.STOP),
    ],
)
async def test_a_turn_ends_where_it_must(asked: GenerationRequest, tokens: list[int], reason: FinishReason) -> None:
    generation = await (await started()).generate(asked)
    assert (generation.token_ids, generation.finish_reason) == (tokens, reason)
    assert [segment.weight_version for segment in generation.segments] == [0]


@pytest.mark.parametrize("recomputes", [False, True])
async def test_every_token_has_the_version_that_computed_it(recomputes: bool) -> None:
    kind = type("Kind", (Counting,), {"recomputes": recomputes})
    engine = await started(kind, free=2)
    playing = asyncio.create_task(engine.generate(request(max_new_tokens=5)))
    await until(lambda: engine.health().generated_tokens == 2 and engine._stepping, every_s=0)
    updating = asyncio.create_task(engine.update(WeightUpdate(version=4, complete=False)))
    await asyncio.sleep(0)
    assert not engine.loaded, "a step was running"
    engine.allowed.release()
    await updating
    for _ in range(2):
        engine.allowed.release()
    old, new = (await playing).segments
    assert (old.token_ids.tolist(), old.weight_version, old.mixed_cache) == ([1, 2, 3], 0, False)
    assert (new.token_ids.tolist(), new.weight_version, new.mixed_cache) == ([4, 5], 4, not recomputes)
    assert engine.version == 4 and engine.loaded == [4]


async def test_slots_bound_what_runs_and_a_cancelled_request_leaves_its_slot() -> None:
    engine = await started(free=0, num_slots=1)
    first, second = (asyncio.create_task(engine.generate(request(name))) for name in "ab")
    await until(lambda: len(engine._live) == 2, every_s=0)
    health = engine.health()
    assert (health.running, health.waiting) == (1, 1)
    with pytest.raises(InvalidRequestError, match="already being generated"):
        await engine.generate(request("a"))
    for task in (first, second):
        task.cancel()
        await asyncio.wait([task])
    assert not engine._live and engine.health().running == 0


async def test_a_fault_of_the_users_stream_is_an_infrastructure_failure() -> None:
    class Broken(Counting):
        async def tokens(self, request: GenerationRequest) -> AsyncIterator[tuple[int, float]]:
            yield 1, -0.5
            raise KeyError("weights")

    with pytest.raises(InfrastructureError, match=r"Broken\.tokens raised KeyError: 'weights'"):
        await (await started(Broken)).generate(request())

    class Plain(Counting):
        def tokens(self, request: GenerationRequest) -> Any:
            return [(1, -0.5)]

    with pytest.raises(ConfigError, match=r"Plain\.tokens is no async generator: write `async def tokens"):
        await (await started(Plain)).generate(request())


async def test_what_it_cannot_do_is_refused() -> None:
    engine = await started()
    with pytest.raises(InvalidRequestError, match="does not tell which tokens top_k"):
        await engine.generate(request(top_k=5))
    with pytest.raises(PromptTooLongError):
        await engine.generate(request(prompt=64))
    with pytest.raises(ConfigError, match="cannot score"):
        await engine.score(None)  # type: ignore[arg-type]
    await engine.stop()
    with pytest.raises(InfrastructureError, match="stopped"):
        await engine.generate(request())
