"""Engines that keep the KV cache of running requests at an update: tokens of a mixed cache are marked."""

from __future__ import annotations

import asyncio

import pytest

from services.common.weights.snapshot import named_weights
from services.inference.engine.base import KvPolicy, WeightUpdate
from tests.conformance.subjects import Subject, until_tokens
from tests.random_models import TOLERANCE, make_prompt, make_request, max_gap

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture
def kv_policy() -> KvPolicy:
    return KvPolicy.KEEP


async def test_what_a_kept_cache_goes_into_is_marked(exact: Subject) -> None:
    """The engine may reuse such a cache for a later request; the tokens of the request are then marked, too."""
    engine, new = exact.engine, exact.next_model()
    prompt = make_prompt(40)
    pending = asyncio.ensure_future(engine.generate(make_request(prompt, max_new_tokens=500)))
    await until_tokens(engine, 10)
    await engine.update(WeightUpdate.full(named_weights(new), 1))
    generation = await pending
    before, after = generation.segments
    assert max_gap(exact.model, prompt, generation, before) <= TOLERANCE
    assert max_gap(new, prompt, generation, after) > 100 * TOLERANCE
    assert after.mixed_cache
    longer = prompt + generation.token_ids
    again = await engine.generate(make_request(longer, max_new_tokens=10))
    assert again.segments[0].mixed_cache or max_gap(new, longer, again, again.segments[0]) <= TOLERANCE
