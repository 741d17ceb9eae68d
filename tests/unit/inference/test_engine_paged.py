"""The torch engine over a pool of blocks: shared prompts, bounded memory, random lives against rows and models."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.config.processes import BLOCK_TOKENS, blocks_of, least_blocks
from services.common.errors import ConfigError, InfrastructureError
from services.common.weights.snapshot import named_weights
from services.inference.engine.base import FinishReason, Generation, KvPolicy, WeightUpdate
from services.inference.engine.torch.decoder import Decoder, prepare
from services.inference.engine.torch.engine import Core, Entry
from services.inference.engine.torch.slots import SlotTable
from tests.random_models import TOLERANCE, build_model, make_prompt, make_request, max_gap, perturbed
from tests.unit.inference.conftest import Launch, StepGate

pytestmark = pytest.mark.usefixtures("each_decoder")

MODELS = [build_model("qwen3")]
MODELS += [perturbed(MODELS[0], seed) for seed in (1, 2, 3)]
TOKEN_BYTES = 2 * 2 * 2 * 24 * 4  # of the model above: layers, keys and values, KV heads, dimensions, bytes
CONTEXT = 160


def pool_bytes(num_blocks: int) -> int:
    return num_blocks * BLOCK_TOKENS * TOKEN_BYTES


class Played:
    """A core that is stepped by hand, and the outcomes of its requests."""

    def __init__(self, *, num_slots: int = 6, policy: KvPolicy = KvPolicy.RECOMPUTE, **cache: Any) -> None:
        decoder = Decoder(copy.deepcopy(MODELS[0]), num_slots=num_slots, context_length=CONTEXT, **cache)
        self.core = Core(decoder, SlotTable(num_slots, CONTEXT), kv_policy=policy, version=0)
        self.outcomes: dict[str, Any] = {}
        self.prompts: dict[str, list[int]] = {}
        self.entries: dict[str, Entry] = {}

    def submit(self, prompt: list[int], seed: int, num_tokens: int) -> str:
        request = make_request(prompt, seed=seed, max_new_tokens=num_tokens)
        name = request.request_id
        self.prompts[name] = prompt
        entry = Entry(request=request, done=lambda outcome: self.outcomes.__setitem__(name, outcome))
        self.entries[name] = entry
        with torch.inference_mode():
            self.core.submit(entry)
        return name

    def step(self, times: int = 1) -> None:
        with torch.inference_mode():
            for _ in range(times):
                if self.core.has_work:
                    self.core.step()
                self.check()

    def end(self) -> None:
        """Steps until no request is left, at most as many as one request alone would need for all."""
        for _ in range(CONTEXT * (len(self.prompts) + 1)):
            if not self.core.has_work:
                return
            self.step()
        raise AssertionError("a request does not end")

    def update(self, version: int) -> None:
        with torch.inference_mode():
            update = WeightUpdate.full(named_weights(MODELS[version]), version)
            self.core.update(prepare(update, self.core.decoder.weights))
        self.check()

    def check(self) -> None:
        """Blocks are free or held; a valid position lies in a held block."""
        ledger, table = self.core.decoder.cache, self.core.table
        assert ledger.num_free + np.count_nonzero(ledger.refs) == ledger.num_blocks
        assert (ledger.held * BLOCK_TOKENS >= table.cached).all()


def test_a_group_holds_its_prompt_once() -> None:
    played = Played(num_slots=16)
    for seed in range(16):
        played.submit(make_prompt(120), seed, 8)
    played.step(2)
    use = played.core.kv.use
    assert use.shared == 120 // BLOCK_TOKENS
    assert use.used == use.shared + 16, "the full blocks of the prompt, and one block of each row"


def test_the_next_turn_goes_on_in_the_blocks_of_the_last_one() -> None:
    played = Played()
    prompt = make_prompt(50)
    for turn in range(3):
        before = played.core.counters.prefilled
        name = played.submit(prompt, turn, 12)
        played.end()
        generation = played.outcomes[name]
        assert max_gap(MODELS[0], prompt, generation, generation.segments[0]) <= TOLERANCE
        assert played.core.counters.prefilled - before == (49 if turn == 0 else 9)
        prompt = prompt + generation.token_ids + make_prompt(9, 100 + turn)
    use = played.core.kv.use
    assert use.used == blocks_of(len(prompt) - 9 - 1)


@pytest.mark.parametrize("policy", list(KvPolicy))
def test_requests_that_exceed_the_memory_wait_for_each_other_and_stay_exact(policy: KvPolicy) -> None:
    """Four requests in a pool of little more than one sequence, with an update while three of them wait."""
    played = Played(policy=policy, kv_bytes=pool_bytes(least_blocks(CONTEXT) + 2))
    names = [played.submit(make_prompt(20, seed), seed, 120) for seed in range(4)]
    played.step(90)
    assert (played.core.table.num_live, played.core.num_waiting) == (1, 3)
    played.update(1)
    played.end()
    assert played.core.counters.generated == 4 * 120
    versions = set()
    for name in names:
        generation: Generation = played.outcomes[name]
        assert len(generation.token_ids) == 120 and generation.finish_reason is FinishReason.LENGTH
        for segment in generation.segments:
            versions.add(segment.weight_version)
            if not segment.mixed_cache:
                gap = max_gap(MODELS[segment.weight_version], played.prompts[name], generation, segment)
                assert gap <= TOLERANCE
    assert versions == {0, 1}
    mixed = [s.mixed_cache for name in names for s in played.outcomes[name].segments]
    assert any(mixed) is (policy is KvPolicy.KEEP)


def test_a_version_under_which_nothing_is_sampled_leaves_no_segment() -> None:
    played = Played()
    name = played.submit(make_prompt(20), 0, 20)
    played.step(5)
    played.update(1)
    played.update(2)
    played.end()
    assert [(s.weight_version, s.num_tokens) for s in played.outcomes[name].segments] == [(0, 5), (2, 15)]


def test_a_limit_that_holds_no_sequence_is_refused_with_one_that_does() -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_gib is .*one sequence of 160 tokens needs .*raise kv_cache_gib"):
        Played(kv_bytes=pool_bytes(least_blocks(CONTEXT)) - 1)


async def test_health_counts_requests_without_memory_as_waiting_and_tells_the_pool(launch: Launch) -> None:
    gate = StepGate(at=60)
    limit = pool_bytes(least_blocks(CONTEXT))
    engine = await launch(MODELS[0], num_slots=4, context_length=CONTEXT, kv_bytes=limit, on_tokens=gate)
    requests = [make_request(make_prompt(30, seed), max_new_tokens=90) for seed in range(2)]
    group = [asyncio.ensure_future(engine.generate(request)) for request in requests]
    await gate.reached()
    health = engine.health()
    gate.open()
    assert (health.running, health.waiting) == (1, 1)
    assert health.kv is not None
    assert health.kv.blocks == least_blocks(CONTEXT) - 2
    await asyncio.gather(*group)
    assert engine.health().waiting == 0


async def test_a_broken_version_leaves_no_trace_in_blocks(launch: Launch) -> None:
    limit = pool_bytes(least_blocks(CONTEXT))
    engine = await launch(MODELS[0], num_slots=4, context_length=CONTEXT, kv_bytes=limit)
    weights = named_weights(MODELS[0])
    broken = {name: torch.full_like(tensor, torch.nan) for name, tensor in weights.items()}
    await engine.update(WeightUpdate.full(broken, 1))
    requests = [engine.generate(make_request(make_prompt(64), seed=i, max_new_tokens=5)) for i in range(4)]
    outcomes = await asyncio.gather(*requests, return_exceptions=True)
    assert all(isinstance(outcome, InfrastructureError) for outcome in outcomes)
    await engine.update(WeightUpdate.full(weights, 2))
    for prompt in (make_prompt(3), make_prompt(90, 1)):
        generation = await engine.generate(make_request(prompt, max_new_tokens=50))
        assert max_gap(MODELS[0], prompt, generation, generation.segments[0]) <= TOLERANCE


events = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(0, 5), st.integers(1, 40)),
        st.tuples(st.just("turn"), st.integers(0, 9), st.integers(1, 20)),
        st.tuples(st.just("cancel"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("step"), st.integers(1, 12), st.just(0)),
        st.tuples(st.just("swap"), st.integers(1, 3), st.just(0)),
        st.tuples(st.just("flush"), st.just(0), st.just(0)),
    ),
    max_size=25,
)


def play(played: Played, story: list[tuple[str, int, int]], swaps: bool) -> list[str]:
    """Play the events; a turn goes on from an ended request. Returns the requests in the order of their submission."""
    names: list[str] = []
    for seed, (event, number, size) in enumerate(story):
        match event:
            case "submit":  # of few prompts, so that groups form, some of them alike for a part
                prompt = [*make_prompt(45, number // 3), *make_prompt(number * 7, number)]
                names.append(played.submit(prompt, seed, size))
            case "turn" if names:
                before = names[number % len(names)]
                played.end()
                said = played.outcomes[before].token_ids if before in played.outcomes else []
                prompt = [*played.prompts[before], *said, 5, 6, 7]
                if len(prompt) < CONTEXT:
                    names.append(played.submit(prompt, seed, size))
            case "cancel" if names:
                played.core.withdraw(played.entries[names[number % len(names)]])
            case "step":
                played.step(number)
            case "swap" if swaps:
                played.update(number)
            case "flush":
                played.core.kv.forget()
        played.check()
    played.end()
    return names


@settings(max_examples=12, deadline=None)
@given(story=events, extra=st.integers(0, 6))
def test_a_random_life_in_little_memory_equals_a_forward_pass_of_each_version(
    story: list[tuple[str, int, int]], extra: int
) -> None:
    played = Played(kv_bytes=pool_bytes(least_blocks(CONTEXT) + extra))
    for name in play(played, story, swaps=True):
        if (generation := played.outcomes.get(name)) is None:
            continue  # cancelled
        for segment in generation.segments:
            gap = max_gap(MODELS[segment.weight_version], played.prompts[name], generation, segment)
            assert gap <= TOLERANCE
    played.core.kv.forget()
    ledger = played.core.decoder.cache
    assert ledger.num_free == ledger.num_blocks, "a block leaks"


@settings(max_examples=8, deadline=None)
@given(story=events.map(lambda story: [event for event in story if event[0] != "cancel"]), extra=st.integers(0, 6))
def test_little_memory_and_sharing_change_no_sample(story: list[tuple[str, int, int]], extra: int) -> None:
    """Against one slot, where nothing is shared between requests that run at once."""
    paged = Played(kv_bytes=pool_bytes(least_blocks(CONTEXT) + extra))
    alone = Played(num_slots=1)
    for one, other in zip(play(paged, story, swaps=False), play(alone, story, swaps=False), strict=True):
        assert paged.outcomes[one].token_ids == alone.outcomes[other].token_ids
