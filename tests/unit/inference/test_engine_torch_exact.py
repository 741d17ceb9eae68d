"""The torch engine against plain transformers forward passes: log-probabilities, versions, weight updates."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402

from services.common.errors import ModelMismatchError  # noqa: E402
from services.common.models import named_weights  # noqa: E402
from services.common.types import Segment  # noqa: E402
from services.inference.engine.base import FinishReason, Generation, KvPolicy  # noqa: E402
from services.inference.engine.weight_update import WeightUpdate  # noqa: E402

from .conftest import VOCAB, Launch, StepGate, build_model, make_prompt, make_request, perturbed, reference_logprobs  # noqa: E402

TOLERANCE = 1e-4
KINDS = [("qwen3", True), ("qwen3", False), ("llama", True), ("qwen2", False)]


def max_gap(model: Any, prompt: list[int], generation: Generation, segment: Segment, temperature: float = 1.0) -> float:
    """Largest distance of one segment's log-probabilities from a forward pass of ``model`` over everything before."""
    ids = prompt + generation.token_ids
    reference = reference_logprobs(model, ids, len(prompt), temperature=temperature)
    chosen = reference[torch.arange(len(generation.token_ids)), torch.tensor(generation.token_ids)].numpy()
    start = 0
    for other in generation.segments:
        if other is segment:
            return float(np.abs(chosen[start : start + segment.num_tokens] - segment.logprobs).max())
        start += other.num_tokens
    raise AssertionError("not a segment of this generation")


@pytest.mark.parametrize(("kind", "tied"), KINDS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_equal_a_forward_pass(launch: Launch, kind: str, tied: bool, temperature: float) -> None:
    model = build_model(kind, tied=tied)
    engine = await launch(model)
    prompts = [make_prompt(length, seed) for seed, length in enumerate([3, 50, 20, 20, 33, 1, 90])]
    generations = await asyncio.gather(
        *(
            engine.generate(make_request(p, seed=i, temperature=temperature, max_new_tokens=40))
            for i, p in enumerate(prompts)
        )
    )
    for prompt, generation in zip(prompts, generations, strict=True):
        assert len(generation.token_ids) == 40
        assert max_gap(model, prompt, generation, generation.segments[0], temperature) <= TOLERANCE


@pytest.mark.parametrize(("top_k", "top_p"), [(5, 1.0), (0, 0.8), (20, 0.6)])
async def test_filtered_logprobs_are_renormalised_over_the_kept_set(launch: Launch, top_k: int, top_p: float) -> None:
    model = build_model("qwen3")
    engine = await launch(model)
    prompt = make_prompt(12)
    generation = await engine.generate(
        make_request(prompt, temperature=1.3, top_k=top_k, top_p=top_p, max_new_tokens=60)
    )
    reference = reference_logprobs(model, prompt + generation.token_ids, len(prompt), temperature=1.3).numpy()
    for row, token, logprob in zip(reference, generation.token_ids, generation.segments[0].logprobs, strict=True):
        order = np.argsort(-row)[: top_k or VOCAB]
        p = np.exp(row[order].astype(np.float64))
        p /= p.sum()
        kept = int(np.searchsorted(np.cumsum(p), top_p)) + 1
        place = order[:kept].tolist().index(token)  # fails when a token outside the kept set was drawn
        assert abs(np.log(p[place] / p[:kept].sum()) - logprob) <= TOLERANCE


@pytest.mark.parametrize(("kind", "tied"), KINDS)
async def test_greedy_equals_transformers_generate(launch: Launch, kind: str, tied: bool) -> None:
    model = build_model(kind, tied=tied)
    engine = await launch(model)
    prompt = make_prompt(15)
    generation = await engine.generate(make_request(prompt, temperature=0.0, max_new_tokens=50))
    theirs = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, 15),
        do_sample=False,
        max_new_tokens=50,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert generation.token_ids == theirs[0, 15:].tolist()
    assert max_gap(model, prompt, generation, generation.segments[0]) <= TOLERANCE


@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen2"])
async def test_logprobs_are_exact_before_and_after_an_update_in_mid_generation(launch: Launch, kind: str) -> None:
    old = build_model(kind)
    new = perturbed(old)
    gate = StepGate(at=12)
    engine = await launch(old, on_tokens=gate)
    shared = make_prompt(40)
    prompts = [shared, shared, make_prompt(5, 3), [*shared, 9, 8, 7]]
    pending = [
        asyncio.ensure_future(engine.generate(make_request(p, seed=i, max_new_tokens=30)))
        for i, p in enumerate(prompts)
    ]
    stall = await gate.run(engine.update(WeightUpdate.full(named_weights(new), 1)))
    assert stall > 0
    assert engine.version == 1
    for prompt, generation in zip(prompts, await asyncio.gather(*pending), strict=True):
        before, after = generation.segments
        assert (before.weight_version, after.weight_version) == (0, 1)
        assert not after.mixed_cache
        assert before.num_tokens + after.num_tokens == 30  # the budget covers the whole request
        assert generation.finish_reason is FinishReason.LENGTH
        assert max_gap(old, prompt, generation, before) <= TOLERANCE
        assert max_gap(new, prompt, generation, after) <= TOLERANCE
        assert max_gap(old, prompt, generation, after) > 100 * TOLERANCE  # the test would notice old weights


async def test_kept_cache_is_marked_and_never_reused(launch: Launch) -> None:
    old = build_model("qwen3")
    new = perturbed(old)
    gate = StepGate(at=10)
    engine = await launch(old, on_tokens=gate, kv_policy=KvPolicy.KEEP)
    prompt = make_prompt(40)
    pending = asyncio.ensure_future(engine.generate(make_request(prompt, max_new_tokens=30)))
    await gate.run(engine.update(WeightUpdate.full(named_weights(new), 1)))
    generation = await pending
    assert [s.mixed_cache for s in generation.segments] == [False, True]
    assert max_gap(new, prompt, generation, generation.segments[1]) > 100 * TOLERANCE
    longer = prompt + generation.token_ids
    again = await engine.generate(make_request(longer, max_new_tokens=10))
    assert not again.segments[0].mixed_cache
    assert max_gap(new, longer, again, again.segments[0]) <= TOLERANCE
    assert engine.counters.reused == 0


async def test_cached_prefixes_die_with_their_version(launch: Launch) -> None:
    old = build_model("qwen3")
    new = perturbed(old)
    engine = await launch(old)
    prompt = make_prompt(40)
    await engine.generate(make_request(prompt, max_new_tokens=10))
    await engine.update(WeightUpdate.full(named_weights(new), 1))
    generation = await engine.generate(make_request(prompt, max_new_tokens=10))
    assert engine.counters.reused == 0
    assert max_gap(new, prompt, generation, generation.segments[0]) <= TOLERANCE


async def test_updates_one_after_another_give_one_segment_each(launch: Launch) -> None:
    models = [build_model("qwen3")]
    models += [perturbed(models[0], seed) for seed in (1, 2)]
    gate = StepGate(at=6)
    engine = await launch(models[0], on_tokens=gate)
    prompt = make_prompt(30)
    pending = asyncio.ensure_future(engine.generate(make_request(prompt, max_new_tokens=60)))
    await gate.run(engine.pause())
    await engine.update(
        WeightUpdate.full(named_weights(models[1]), 1)
    )  # nothing is sampled under version 1: no empty segment
    await engine.update(WeightUpdate.full(named_weights(models[2]), 2))
    await engine.resume()
    generation = await pending
    assert [s.weight_version for s in generation.segments] == [0, 2]
    assert max_gap(models[2], prompt, generation, generation.segments[1]) <= TOLERANCE


@pytest.mark.parametrize("fault", ["shape", "missing", "unexpected"])
async def test_a_wrong_update_changes_nothing(launch: Launch, fault: str) -> None:
    model = build_model("qwen3", tied=False)
    engine = await launch(model)
    weights = named_weights(perturbed(model))
    last = list(weights)[-1]
    match fault:
        case "shape":
            weights[last] = weights[last][:-1]
        case "missing":
            del weights[last]
        case "unexpected":
            weights["model.layers.9.mlp.up_proj.weight"] = weights[last]
    with pytest.raises(ModelMismatchError, match=r"lm_head\.weight|layers\.9"):
        await engine.update(WeightUpdate.full(weights, 1))
    assert engine.version == 0
    prompt = make_prompt(10)
    generation = await engine.generate(make_request(prompt, max_new_tokens=10))
    assert max_gap(model, prompt, generation, generation.segments[0]) <= TOLERANCE


@pytest.mark.parametrize(("engine_dtype", "tolerance"), [(torch.float32, TOLERANCE), (torch.bfloat16, 0.2)])
async def test_weights_of_the_other_dtype_are_converted(launch: Launch, engine_dtype: Any, tolerance: float) -> None:
    """float32 from bfloat16 is exact; bfloat16 from float32 is as near as its rounding in the forward pass allows."""
    model = build_model("qwen3")
    published = torch.bfloat16 if engine_dtype is torch.float32 else torch.float32
    weights = {name: tensor.to(published) for name, tensor in named_weights(perturbed(model, scale=0.2)).items()}
    reference = copy.deepcopy(model)
    for name, tensor in named_weights(reference).items():
        tensor.copy_(weights[name].to(torch.bfloat16))
    engine = await launch(model.to(engine_dtype))
    await engine.update(WeightUpdate.full(weights, 1))
    prompt = make_prompt(20)
    generation = await engine.generate(make_request(prompt, max_new_tokens=10))
    assert max_gap(reference, prompt, generation, generation.segments[0]) <= tolerance
    assert max_gap(build_model("qwen3"), prompt, generation, generation.segments[0]) > 0.5


async def test_the_model_handed_over_stays_in_step_with_the_engine() -> None:
    from services.inference.engine.decoder import Decoder

    model = build_model("qwen2")
    new = perturbed(model)
    decoder = Decoder(model, num_slots=1, context_length=32)
    decoder.load(decoder.prepare(WeightUpdate.full(named_weights(new), 1)))
    prompt = make_prompt(9)
    assert torch.equal(reference_logprobs(model, prompt, 1), reference_logprobs(new, prompt, 1))


async def test_an_unsupported_architecture_is_refused_by_name() -> None:
    from transformers import AutoModelForCausalLM, GPT2Config

    from services.inference.engine.torch_engine import TorchEngine

    model = AutoModelForCausalLM.from_config(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=50))
    with pytest.raises(ModelMismatchError, match=r"'gpt2'.*llama, qwen2, qwen3"):
        TorchEngine(model, num_slots=1, context_length=16)


async def test_logits_that_are_not_finite_fail_the_request_and_leave_no_trace(launch: Launch) -> None:
    from services.common.errors import InfrastructureError

    model = build_model("qwen3")
    engine = await launch(model, num_slots=1)
    prompt = make_prompt(30)
    broken = {name: torch.full_like(tensor, torch.nan) for name, tensor in named_weights(model).items()}
    await engine.update(WeightUpdate.full(broken, 1))
    with pytest.raises(InfrastructureError, match="version 1"):
        await engine.generate(make_request(prompt, max_new_tokens=5))
    await engine.update(WeightUpdate.full(named_weights(model), 2))
    generation = await engine.generate(make_request(prompt[:3], max_new_tokens=10))
    assert max_gap(model, prompt[:3], generation, generation.segments[0]) <= TOLERANCE
