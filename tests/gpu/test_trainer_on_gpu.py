"""The trainer on a CUDA device: NCCL, kernels, host offload and loading by shards give the results of the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.common.config.algorithm import M2po
from services.common.config.training import OptimizerConfig
from services.common.text.chat import load_model
from services.common.weights.snapshot import named_weights
from services.trainer.model.attention import Documents, documents_attention
from services.trainer.model.logprobs import token_logprobs
from services.trainer.model.optimizer import MOMENTS, MomentsOnHost
from services.trainer.model.policy_model import load_policy_model
from services.trainer.ranks import Ranks, full, init_ranks, leave_ranks
from tests.unit.trainer.building import rank_batch, tiny_causal_lm, train_step, training_sequences

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.needs("CUDA"),
]

CUDA = torch.device("cuda", 0)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """A group of one over NCCL: FSDP2 shards, gathers and reduces as with many."""
    joined = init_ranks(timeout_s=60.0, device="cuda", always_group=True)
    yield joined
    leave_ranks()


def trained(ranks: Ranks, **settings: Any) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    step = train_step(
        M2po(m2po_threshold=0.2, kl_coefficient=0.1),
        causal_lm=tiny_causal_lm(), ranks=ranks, optimizer=OptimizerConfig(lr=1e-2),
        reference=tiny_causal_lm(seed=1), gradient_checkpointing=True, **settings,
    )  # fmt: skip
    for seed in (0, 1):
        metrics = step.run(rank_batch(training_sequences(11, seed=seed, minibatches=2))).as_dict()
    weights = {name: full(weight).cpu().float() for name, weight in named_weights(step.model.causal_lm).items()}
    return weights, metrics


def test_a_gpu_trains_what_the_cpu_trains(ranks: Ranks) -> None:
    expected, _ = trained(Ranks.single())
    found, metrics = trained(ranks)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=2e-3, msg=name)
    assert metrics["memory_peak_gib"] > 0 and metrics["tflops"] > 0


def test_mixed_precision_over_nccl_is_close_and_keeps_its_masters(ranks: Ranks) -> None:
    _, exact = trained(ranks)
    _, half = trained(ranks, compute_dtype=torch.bfloat16)
    assert half["grad_norm"] == pytest.approx(exact["grad_norm"], rel=0.15)


def test_what_waits_on_the_host_trains_the_same(ranks: Ranks) -> None:
    expected, _ = trained(ranks, compute_dtype=torch.bfloat16)
    found, _ = trained(ranks, compute_dtype=torch.bfloat16, offload=True)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=2e-3, msg=name)


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_moments_wait_in_pinned_memory_and_the_update_has_the_bits_of_one_on_the_device(bucket_bytes: int) -> None:
    torch.manual_seed(0)
    first = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(5))).to(CUDA)
    second = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(5))).to(CUDA)
    second.load_state_dict(first.state_dict())
    plain, ours = (torch.optim.AdamW(model.parameters(), lr=0.1, fused=True) for model in (first, second))
    moments = MomentsOnHost(ours, bucket_bytes)
    for seed in range(4):
        torch.manual_seed(seed)
        x = torch.randn(8, 64, device=CUDA)
        for model in (first, second):
            model(x).square().sum().backward()
        plain.step()
        plain.zero_grad()
        moments.step()
    for theirs, mine in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        for name in MOMENTS:
            assert ours.state[mine][name].is_pinned() and ours.state[mine][name].device.type == "cpu"
            assert torch.equal(ours.state[mine][name], plain.state[theirs][name].cpu())


@pytest.mark.needs("varlen attention")
def test_varlen_equals_sdpa_by_document_forward_and_backward() -> None:
    torch.manual_seed(0)
    offsets = np.cumsum([0, 65, 130, 130, 1, 33]).astype(np.int64)
    documents = Documents.from_offsets(offsets, CUDA)
    inputs = [
        torch.randn(1, heads, int(offsets[-1]), 64, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
        for heads in (8, 2, 2)
    ]
    upstream = torch.randn(1, int(offsets[-1]), 8, 64, device=CUDA, dtype=torch.bfloat16)
    results = []
    for chosen in ("varlen", "sdpa"):
        output, _ = documents_attention(torch.nn.Identity(), *inputs, documents=documents, kernel=chosen)
        results.append([output, *torch.autograd.grad(output, inputs, upstream)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_a_model_is_loaded_by_shards_onto_the_device(ranks: Ranks, tmp_path: Path) -> None:
    tiny_causal_lm().save_pretrained(tmp_path)
    expected = named_weights(load_model(tmp_path))
    for settings in ({}, {"compute_dtype": torch.bfloat16}, {"trainable": False, "offload": True}):
        model = load_policy_model(tmp_path, ranks, **settings)  # type: ignore[arg-type]
        for name, weight in named_weights(model.causal_lm).items():
            where = "cpu" if "offload" in settings else "cuda"
            local = weight.to_local() if hasattr(weight, "to_local") else weight
            assert local.device.type == where, (name, settings)
            assert torch.equal(local.cpu(), expected[name]), (name, settings)
        assert all(buffer.device.type == "cuda" for buffer in model.buffers()), settings


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_vocabulary_head_gives_the_values_and_gradients_of_the_cpu(dtype: torch.dtype) -> None:
    """With bfloat16 operands the products pass tensor cores, with float32 sums."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(70, 128, dtype=dtype), torch.randn(1000, 128, dtype=dtype) / 8
    targets, results = torch.randint(0, 1000, (70,)), []
    for device in ("cpu", CUDA):
        operands = [tensor.to(device).requires_grad_() for tensor in (hidden, weight)]
        logprobs, entropy = token_logprobs(*operands, targets.to(device), 0.7, 32, 300)
        gradients = torch.autograd.grad(logprobs.sum() + entropy.sum(), operands)
        results.append([tensor.detach().cpu().float() for tensor in (logprobs, entropy, *gradients)])
    for expected, found in zip(*results, strict=True):
        apart = float((found - expected).norm() / expected.norm())
        assert apart < (1e-2 if dtype == torch.bfloat16 else 1e-5)
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-4, atol=1e-4)
