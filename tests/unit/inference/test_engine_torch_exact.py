"""The torch engine against plain transformers forward passes: log-probabilities, versions, weight updates."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
import torch

from services.common.errors import ModelMismatchError
from services.common.weights.snapshot import named_weights
from services.inference.engine.base import WeightUpdate
from tests.random_models import (
    TOLERANCE,
    build_model,
    make_prompt,
    make_request,
    max_gap,
    perturbed,
)
from tests.unit.inference.conftest import Launch

pytestmark = pytest.mark.usefixtures("each_decoder")

KINDS = [("qwen3", True), ("qwen3", False), ("llama", True), ("qwen2", False)]


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


async def test_an_unsupported_architecture_is_refused_by_name() -> None:
    from transformers import AutoModelForCausalLM, GPT2Config

    from services.inference.engine.torch.engine import TorchEngine

    model = AutoModelForCausalLM.from_config(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=50))
    with pytest.raises(ModelMismatchError, match=r"'gpt2'.*llama, qwen2, qwen3"):
        TorchEngine(model, num_slots=1, context_length=16)


async def test_a_crash_of_the_engine_thread_fails_all_that_wait(launch: Launch) -> None:
    from services.common.errors import InfrastructureError

    def explode(num_tokens: int, when: float) -> None:
        raise OSError("the disk is gone")

    engine = await launch(build_model("qwen3"), num_slots=1, context_length=64, on_tokens=explode)
    pending = [asyncio.ensure_future(engine.generate(make_request([1, 2, 3], max_new_tokens=9))) for _ in range(3)]
    for outcome in await asyncio.gather(*pending, return_exceptions=True):
        assert isinstance(outcome, InfrastructureError)
        assert "the disk is gone" in outcome.message
    assert not engine.health().ok
    assert "the disk is gone" in engine.health().detail
    with pytest.raises(InfrastructureError, match="disk"):
        await engine.generate(make_request([1, 2, 3], max_new_tokens=9))
