"""Engines over true servers, SGLang's or vLLM's, in tests of servers that die: build, generate for long, compare the result."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from services.common.weights.snapshot import named_weights
from services.inference.engine.base import FinishReason, Generation, WeightUpdate
from services.inference.engine.served.engine import ServedEngine
from tests.conformance.subjects import server_engine, until_tokens
from tests.random_models import TOLERANCE, make_prompt, make_request, max_gap

Build = Callable[..., Awaitable[ServedEngine]]

VERSION = 3
NUM_TOKENS = 400  # of the long generation
PROMPT = make_prompt(20)


@asynccontextmanager
async def engines_of(program: str, model: Any, directory: Path) -> AsyncIterator[Build]:
    """Builds engines of ``model``, and stops them at the end, started or not; ``path`` takes another model's place."""
    built: list[ServedEngine] = []

    async def make(path: str | None = None, **changes: Any) -> ServedEngine:
        engine = server_engine(program, Path(path or model.name_or_path), named_weights(model), directory, **changes)
        built.append(engine)
        return engine

    try:
        yield make
    finally:
        for engine in built:
            await engine.stop()


async def start_long_generation(engine: ServedEngine, new: Any) -> asyncio.Future[Generation]:
    """Start the engine, give it the weights of ``new``, and return a generation of which 40 tokens are there."""
    await engine.start()
    await engine.update(WeightUpdate.full(named_weights(new), VERSION))
    pending = asyncio.ensure_future(engine.generate(make_request(PROMPT, max_new_tokens=NUM_TOKENS)))
    await until_tokens(engine, 40)
    return pending


async def check_long_generation(pending: asyncio.Future[Generation], new: Any) -> None:
    """The generation, interrupted by a killed server, is the one that ``new`` gives without the interruption."""
    async with asyncio.timeout(600):
        generation = await pending
    assert len(generation.token_ids) == NUM_TOKENS  # the tokens of the first call count
    assert generation.finish_reason is FinishReason.LENGTH
    assert [(s.weight_version, s.mixed_cache) for s in generation.segments] == [(VERSION, False)]
    assert max_gap(new, PROMPT, generation, generation.segments[0]) <= TOLERANCE
