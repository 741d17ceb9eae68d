"""An engine that computes one request at a time gives a request the same bits, independent of other requests."""

from __future__ import annotations

import asyncio

import pytest

from services.inference.engine.base import Generation
from tests.random_models import build_model, make_prompt, make_request
from tests.unit.inference.conftest import Launch

pytestmark = pytest.mark.usefixtures("each_decoder")


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
