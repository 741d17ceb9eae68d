"""The torch engine on a CUDA device: the reported log-probabilities equal those of a forward pass on the same device."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import numpy as np
import pytest
import torch

from services.common.weights.snapshot import named_weights
from services.inference.engine.base import WeightUpdate
from services.inference.engine.torch.decoder import Stepping
from services.inference.engine.torch.engine import TorchEngine
from tests.random_models import build_model, make_prompt, make_request, perturbed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.needs("CUDA"),
]

TOLERANCE = 2e-3  # float32 with the GPU's own order of summation


def chosen_logprobs(model: Any, prompt: list[int], sampled: list[int]) -> np.ndarray:
    ids = torch.tensor([prompt + sampled], device="cuda")
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    rows = torch.log_softmax(logits.double(), dim=-1)
    return rows.gather(1, torch.tensor(sampled, device="cuda")[:, None])[:, 0].cpu().numpy()


@pytest.mark.parametrize("stepping", ["eager", "graph", "compiled"])
async def test_logprobs_on_a_gpu_equal_a_forward_pass_before_and_after_an_update(stepping: Stepping) -> None:
    model = build_model("qwen3")
    later = perturbed(model)
    engine = TorchEngine(copy.deepcopy(model), num_slots=8, context_length=256, device="cuda", stepping=stepping)
    await engine.start()
    try:
        prompts = [make_prompt(length, seed) for seed, length in enumerate([3, 40, 40, 17])]
        before = await asyncio.gather(
            *(engine.generate(make_request(p, seed=i, max_new_tokens=32)) for i, p in enumerate(prompts))
        )
        await engine.update(
            WeightUpdate.full({name: tensor.clone() for name, tensor in named_weights(later).items()}, 1)
        )
        after = await asyncio.gather(
            *(engine.generate(make_request(p, seed=i, max_new_tokens=32)) for i, p in enumerate(prompts))
        )
    finally:
        await engine.stop()
    for weights, generations in ((model.cuda(), before), (later.cuda(), after)):
        for prompt, generation in zip(prompts, generations, strict=True):
            behaviour = np.concatenate([segment.logprobs for segment in generation.segments])
            assert np.abs(chosen_logprobs(weights, prompt, generation.token_ids) - behaviour).max() <= TOLERANCE
