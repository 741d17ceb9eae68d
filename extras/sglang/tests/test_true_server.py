"""The engine over true SGLang servers that die, cannot load, or refuse: healed, or explained in the server's own words."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import ConfigError, InfrastructureError
from services.common.weights.snapshot import named_weights
from services.inference.engine.base import WeightUpdate
from tests.conformance.served_engines import Build, check_long_generation, engines_of, start_long_generation
from tests.conformance.subjects import until_tokens
from tests.random_models import TOLERANCE, make_prompt, make_request, max_gap, perturbed

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("sglang_python")]


@pytest.fixture
async def build(model: Any, tmp_path: Path) -> AsyncIterator[Build]:
    async with engines_of("sglang", model, tmp_path) as make:
        yield make


def server_pid(engine: Any) -> int:
    pid = engine.servers[0].process.pid
    assert isinstance(pid, int)
    return pid


async def test_a_killed_server_is_started_again_with_the_version_held_and_its_requests_go_on(
    build: Build, model: Any
) -> None:
    new = perturbed(model)
    engine = await build()
    pending = await start_long_generation(engine, new)
    first = server_pid(engine)
    os.kill(first, signal.SIGKILL)
    await check_long_generation(pending, new)
    assert server_pid(engine) != first
    assert engine.health().ok


async def test_a_server_takes_tensors_in_mid_generation(build: Build, model: Any) -> None:
    new = perturbed(model)
    engine = await build(sglang={"update": "tensors"})
    await engine.start()
    prompt = make_prompt(20)
    await engine.generate(make_request(prompt, max_new_tokens=4))  # a first one takes long
    pending = asyncio.ensure_future(engine.generate(make_request(prompt, max_new_tokens=400)))
    await until_tokens(engine, 60)
    for version, weights in ((1, named_weights(perturbed(model, seed=2))), (2, named_weights(new))):
        await engine.update(WeightUpdate.full(weights, version))
    generation = await pending
    assert [segment.weight_version for segment in generation.segments][-1] == 2
    assert not any(segment.mixed_cache for segment in generation.segments)
    assert max_gap(new, prompt, generation, generation.segments[-1]) <= TOLERANCE
    assert max_gap(model, prompt, generation, generation.segments[-1]) > 100 * TOLERANCE


async def test_two_servers_take_an_update_in_mid_generation_and_one_goes_on_for_both(build: Build, model: Any) -> None:
    new = perturbed(model)
    engine = await build(number=2)
    await engine.start()
    prompts = [make_prompt(20, seed) for seed in range(4)]
    # A first one takes long.
    await asyncio.gather(*(engine.generate(make_request(p, max_new_tokens=4)) for p in prompts))
    pending = [asyncio.ensure_future(engine.generate(make_request(p, max_new_tokens=300))) for p in prompts]
    await until_tokens(engine, 80)
    assert await engine.update(WeightUpdate.full(named_weights(new), 1)) > 0
    await until_tokens(engine, 80)
    os.kill(server_pid(engine), signal.SIGKILL)
    async with asyncio.timeout(600):
        generations = await asyncio.gather(*pending)
    seen = [[segment.weight_version for segment in generation.segments] for generation in generations]
    assert [0, 1] in seen, "the update reached a request in mid-generation"
    for prompt, generation in zip(prompts, generations, strict=True):
        assert len(generation.token_ids) == 300
        for segment in generation.segments:
            assert not segment.mixed_cache
            assert max_gap([model, new][segment.weight_version], prompt, generation, segment) <= TOLERANCE


async def test_a_model_path_that_is_not_there_is_named_before_any_server_starts(build: Build, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, InfrastructureError), match="no_such_model"):
        await (await build(str(tmp_path / "no_such_model"))).start()
