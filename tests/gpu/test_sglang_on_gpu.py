"""The true SGLang server on a card: exact log-probabilities before and after each way of an update, and a whole run.

ROLLMILL_SGLANG_PYTHON=... make test-gpu
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.common.weights.snapshot import named_weights
from services.inference.engine.base import WeightUpdate
from tests.conformance.subjects import server_engine, until_tokens
from tests.random_models import build_model, make_prompt, make_request, max_gap, perturbed
from tests.server_quickstart import check_ten_steps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.needs("CUDA"),
    pytest.mark.usefixtures("sglang_python"),
]

# Kernels that every build of SGLang has.
ARGUMENTS = {"attention_backend": "triton", "sampling_backend": "pytorch", "grammar_backend": "none"}
GAP = {"float32": 5e-3, "bfloat16": 0.1}  # of log-probabilities: the order of sums and the products of the kernels
TOKENS = 300


@pytest.mark.parametrize(("dtype", "update"), [("float32", "disk"), ("bfloat16", "tensors")])
async def test_logprobs_of_sglang_on_a_card_equal_a_forward_pass_before_and_after_an_update(
    tmp_path: Path, dtype: str, update: str
) -> None:
    model = build_model("qwen3", head_dim=64).to(getattr(torch, dtype))
    later = perturbed(model)
    model.save_pretrained(tmp_path / "model")
    server = {"memory_share": 0.1, "update": update, "extra_arguments": ARGUMENTS}
    settings: dict[str, Any] = {"device": "cuda", "dtype": dtype, "num_slots": 8, "sglang": server}
    engine = server_engine("sglang", tmp_path / "model", named_weights(model), tmp_path, **settings)
    await engine.start()
    try:
        prompts = [make_prompt(length, seed) for seed, length in enumerate([3, 40, 40, 17])]
        before = await asyncio.gather(
            *(engine.generate(make_request(p, seed=i, max_new_tokens=32)) for i, p in enumerate(prompts))
        )
        running = asyncio.ensure_future(engine.generate(make_request(prompts[1], max_new_tokens=TOKENS)))
        await until_tokens(engine, 20)
        await engine.update(
            WeightUpdate.full({name: tensor.clone() for name, tensor in named_weights(later).items()}, 1)
        )
        across = await running
        after = await asyncio.gather(
            *(engine.generate(make_request(p, seed=i, max_new_tokens=32)) for i, p in enumerate(prompts))
        )
    finally:
        await engine.stop()
    for weights, generations in ((model.float(), before), (later.float(), after)):
        for prompt, generation in zip(prompts, generations, strict=True):
            assert [max_gap(weights, prompt, generation, segment) <= GAP[dtype] for segment in generation.segments] == [
                True
            ]
    assert len(across.token_ids) == TOKENS and across.segments[-1].weight_version == 1
    assert np.isfinite(np.concatenate([segment.logprobs for segment in across.segments])).all()
    assert max_gap(later, prompts[1], across, across.segments[-1]) <= GAP[dtype]


def test_ten_steps_of_the_quickstart_learn_by_sglang_on_a_card(tmp_path: Path) -> None:
    kernels = "{attention_backend: triton, sampling_backend: pytorch, grammar_backend: none}"
    check_ten_steps(
        "sglang",
        tmp_path,
        [
            "inference.a.device=cuda",
            "inference.a.dtype=float32",
            "inference.a.sglang.memory_share=0.1",
            f"inference.a.sglang.extra_arguments={kernels}",
            "policies.model0.trainer.device=cuda",
            "policies.model0.trainer.compute_dtype=float32",
        ],
    )
