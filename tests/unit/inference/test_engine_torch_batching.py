"""How the torch engine batches: joining, leaving, prefix reuse, groups, moves between slots, seeds."""

from __future__ import annotations

import asyncio

import pytest

from services.inference.engine.base import Generation
from tests.random_models import TOLERANCE, build_model, make_prompt, make_request, max_gap
from tests.unit.inference.conftest import Launch, StepGate

pytestmark = pytest.mark.usefixtures("each_decoder")


async def test_a_groups_prompt_is_prefilled_once(launch: Launch) -> None:
    model = build_model("qwen3")
    gate = StepGate(at=1)
    engine = await launch(model, on_tokens=gate)
    first = asyncio.ensure_future(engine.generate(make_request(make_prompt(5, 9), max_new_tokens=4)))
    prompt = make_prompt(60)
    # All eight wait together while the gate is closed.
    group = await gate.run(
        asyncio.gather(*(engine.generate(make_request(prompt, seed=i, max_new_tokens=20)) for i in range(7)))
    )
    await first
    assert engine.counters.prefilled == 4 + 59
    assert engine.counters.reused == 6 * 59
    assert len({tuple(g.token_ids) for g in group}) == 7
    for generation in group:
        assert max_gap(model, prompt, generation, generation.segments[0]) <= TOLERANCE


async def test_a_seed_gives_the_same_sample_whatever_runs_beside_it(launch: Launch) -> None:
    engine = await launch(build_model("qwen3"))
    prompt = make_prompt(25)
    alone = await engine.generate(make_request(prompt, seed=42, max_new_tokens=40))
    crowd = [engine.generate(make_request(make_prompt(10 + i, i), seed=i, max_new_tokens=30)) for i in range(12)]
    crowded, *_ = await asyncio.gather(engine.generate(make_request(prompt, seed=42, max_new_tokens=40)), *crowd)
    assert crowded.token_ids == alone.token_ids
    other = await engine.generate(make_request(prompt, seed=43, max_new_tokens=40))
    assert other.token_ids != alone.token_ids


# -- An engine that computes one request at a time gives a request the same bits, independent of other requests.


def bits(generation: Generation) -> list[tuple[bytes, bytes]]:
    return [(segment.token_ids.tobytes(), segment.logprobs.tobytes()) for segment in generation.segments]


async def test_a_request_gets_the_same_bits_alone_in_company_and_after_its_own_prefix(launch: Launch) -> None:
    model = build_model("qwen3")
    prompt = make_prompt(40)
    fresh = await launch(model, num_slots=1, alone=True)
    expected = bits(await fresh.generate(make_request(prompt, max_new_tokens=20, seed=7)))
    used = await launch(model, num_slots=1, alone=True)
    company = [used.generate(make_request(make_prompt(n), max_new_tokens=9, seed=n)) for n in (3, 17, 64)]
    found, *_ = await asyncio.gather(used.generate(make_request(prompt, max_new_tokens=20, seed=7)), *company)
    assert bits(found) == expected
    # Its own prompt, and a longer one with this prefix, have been computed before.
    await used.generate(make_request(make_prompt(60), max_new_tokens=20, seed=8))
    assert bits(await used.generate(make_request(prompt, max_new_tokens=20, seed=7))) == expected
    assert used.counters.reused == 0
