"""Log-probabilities against a plain transformers forward pass: before, across and after a weight update."""

from __future__ import annotations

import asyncio
import copy

import numpy as np
import pytest
import torch

from services.common.records import Segment, StopReason, TokenSequence, TrainingSequence
from services.common.weights.snapshot import named_weights
from services.inference.engine.base import FinishReason, WeightUpdate
from services.trainer.model.micro_batches import Document, forward, pack_for_ranks
from services.trainer.model.policy_model import build_policy_model
from services.trainer.ranks import Ranks
from tests.conformance.conftest import SERVERS
from tests.conformance.subjects import Subject, until_tokens
from tests.random_models import TOLERANCE, VOCAB, kept_sets, make_prompt, make_request, max_gap, reference_logprobs

pytestmark = pytest.mark.asyncio(loop_scope="session")

SAMPLING = pytest.mark.parametrize("exact", ["torch-qwen3", *SERVERS], indirect=True)  # the others do not sample


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_equal_a_forward_pass(exact: Subject, temperature: float) -> None:
    prompts = [make_prompt(length, seed) for seed, length in enumerate([3, 50, 20, 20, 33, 1, 90])]
    generations = await asyncio.gather(
        *(
            exact.engine.generate(make_request(p, seed=i, temperature=temperature, max_new_tokens=40))
            for i, p in enumerate(prompts)
        )
    )
    for prompt, generation in zip(prompts, generations, strict=True):
        assert len(generation.token_ids) == 40
        assert max_gap(exact.model, prompt, generation, generation.segments[0], temperature) <= TOLERANCE


@SAMPLING
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(5, 1.0, 0.0), (0, 0.8, 0.0), (20, 0.6, 0.0), (0, 1.0, 0.1), (20, 0.9, 0.3)]
)
async def test_filtered_logprobs_are_renormalised_over_the_kept_set_which_is_told(
    exact: Subject, top_k: int, top_p: float, min_p: float
) -> None:
    prompt = make_prompt(12)
    generation = await exact.engine.generate(
        make_request(prompt, temperature=1.3, top_k=top_k, top_p=top_p, min_p=min_p, max_new_tokens=60)
    )
    told = kept_sets(generation)
    reference = reference_logprobs(exact.model, prompt + generation.token_ids, len(prompt), temperature=1.3).numpy()
    for row, token, logprob, drawable in zip(
        reference, generation.token_ids, generation.segments[0].logprobs, told, strict=True
    ):
        order = np.argsort(-row)
        p = np.exp(row[order].astype(np.float64))
        if exact.min_p_first:
            p[p < min_p * p[0]] = 0
            p /= p.sum()
        if exact.cuts_in_turn:
            p[top_k or VOCAB :] = 0
            p /= p.sum()
        kept = min(int(np.searchsorted(np.cumsum(p), top_p)) + 1, top_k or VOCAB, int((p >= min_p * p[0]).sum()))
        assert drawable == set(order[:kept].tolist())
        place = order[:kept].tolist().index(token)  # fails when a token outside the kept set was drawn
        assert abs(np.log(p[place] / p[:kept].sum()) - logprob) <= TOLERANCE


@SAMPLING
async def test_minimum_length_suppresses_stop_tokens_and_renormalises(exact: Subject) -> None:
    prompt = make_prompt(10)
    stops = tuple(range(0, VOCAB - 1, 2))  # half of the vocabulary: the request would stop at once
    generation = await exact.engine.generate(make_request(prompt, stop=stops, min_new_tokens=20, max_new_tokens=60))
    assert not set(generation.token_ids[:20]) & set(stops)
    assert generation.finish_reason is FinishReason.STOP
    assert generation.token_ids[-1] in stops
    assert kept_sets(generation) == [
        set(range(VOCAB)) - (set(stops) if place < 20 else set()) for place in range(len(generation.token_ids))
    ]
    reference = reference_logprobs(exact.model, prompt + generation.token_ids, len(prompt)).numpy()
    logprobs = np.concatenate([segment.logprobs for segment in generation.segments])
    for place, (row, token, logprob) in enumerate(zip(reference, generation.token_ids, logprobs, strict=True)):
        if place < 20:
            row[list(stops)] = -np.inf
        assert abs(float(row[token]) - float(np.logaddexp.reduce(row)) - float(logprob)) <= TOLERANCE


@SAMPLING
async def test_the_trainer_scores_truncated_tokens_as_the_engine_did(exact: Subject) -> None:
    prompt = make_prompt(11)
    generation = await exact.engine.generate(
        make_request(
            prompt,
            stop=(3, 5),
            temperature=1.3,
            top_k=30,
            top_p=0.9,
            min_p=0.01,
            min_new_tokens=8,
            max_new_tokens=50,
        )
    )
    sequence = TokenSequence(
        policy="p",
        segments=(Segment.environment(prompt), *generation.segments),
        reward=0.0,
        stop_reason=StopReason.STOP,
    )
    item = TrainingSequence(
        sequence_id="g/0/0",
        sequence=sequence,
        group_mean=0.0,
        group_std=1.0,
        group_size=1,
        staleness=0,
        minibatch=0,
        position=0,
    )
    ranks = Ranks.single()
    model = build_policy_model(copy.deepcopy(exact.model), ranks, trainable=False)
    ((batch,),) = pack_for_ranks([[Document.from_training_sequence(item, 0.0)]], 1000, ranks, torch.float32)
    scored, *_ = forward(model, batch, 1.3)
    assert len(batch.behaviour) == len(generation.token_ids)
    assert float((scored - batch.behaviour).abs().max()) <= TOLERANCE


@SAMPLING
async def test_greedy_takes_the_likeliest_token(exact: Subject) -> None:
    prompt = make_prompt(15)
    generation = await exact.engine.generate(make_request(prompt, temperature=0.0, max_new_tokens=50))
    reference = reference_logprobs(exact.model, prompt + generation.token_ids, len(prompt))
    assert generation.token_ids == reference.argmax(dim=-1).tolist()
    assert max_gap(exact.model, prompt, generation, generation.segments[0]) <= TOLERANCE


async def test_logprobs_are_those_of_their_version_before_across_and_after_an_update(exact: Subject) -> None:
    old, new = exact.model, exact.next_model()
    shared = make_prompt(40)
    prompts = [shared, [*shared, 9, 8, 7]]
    pending = [
        asyncio.ensure_future(exact.engine.generate(make_request(p, seed=i, max_new_tokens=300)))
        for i, p in enumerate(prompts)
    ]
    await until_tokens(exact.engine, 40)
    assert await exact.engine.update(WeightUpdate.full(named_weights(new), 1)) > 0
    assert exact.engine.version == 1
    for prompt, generation in zip(prompts, await asyncio.gather(*pending), strict=True):
        before, after = generation.segments
        assert (before.weight_version, after.weight_version) == (0, 1)
        assert not after.mixed_cache
        assert before.num_tokens + after.num_tokens == 300  # the budget covers the whole request
        assert generation.finish_reason is FinishReason.LENGTH
        assert max_gap(old, prompt, generation, before) <= TOLERANCE
        assert max_gap(new, prompt, generation, after) <= TOLERANCE
        assert max_gap(old, prompt, generation, after) > 100 * TOLERANCE  # the test would notice old weights
    later = await exact.engine.generate(make_request(shared, max_new_tokens=20))
    assert [s.weight_version for s in later.segments] == [1]
    assert max_gap(new, shared, later, later.segments[0]) <= TOLERANCE


async def test_cached_prefixes_die_with_their_version(exact: Subject) -> None:
    prompt = make_prompt(40)
    await exact.engine.generate(make_request(prompt, max_new_tokens=10))
    new = exact.next_model()
    await exact.engine.update(WeightUpdate.full(named_weights(new), 1))
    generation = await exact.engine.generate(make_request(prompt, max_new_tokens=10))
    assert max_gap(new, prompt, generation, generation.segments[0]) <= TOLERANCE


async def test_a_refused_update_leaves_the_weights_as_they_were(exact: Subject) -> None:
    weights = dict(named_weights(exact.next_model()))
    last = list(weights)[-1]
    weights[last] = weights[last][:-1]
    with pytest.raises(Exception, match=last.replace(".", r"\.")):
        await exact.engine.update(WeightUpdate.full(weights, 1))
    prompt = make_prompt(10)
    generation = await exact.engine.generate(make_request(prompt, max_new_tokens=10))
    assert max_gap(exact.model, prompt, generation, generation.segments[0]) <= TOLERANCE
