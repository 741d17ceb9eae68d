"""Moments on the host: updates by buckets of any size equal one whole update, and checkpoints contain the moments."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.common.config.training import OptimizerConfig
from services.trainer.checkpoints import CheckpointIdentity, Checkpoints
from services.trainer.model.optimizer import MOMENTS, MomentsOnHost
from services.trainer.ranks import Ranks
from tests.unit.trainer.building import algorithm, rank_batch, train_step, training_sequences


def layers() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.RMSNorm(7), torch.nn.Linear(7, 3))


def adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    parameters = list(model.parameters())
    groups = [{"params": parameters[:2], "weight_decay": 0.1}, {"params": parameters[2:], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.1, fused=True)


def backward(model: torch.nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    model(torch.randn(4, 5)).square().sum().backward()


@pytest.mark.parametrize("bucket_bytes", [1, 130, 1 << 20])
def test_an_update_by_buckets_has_the_bits_of_one_in_one_go(bucket_bytes: int) -> None:
    plain, parted = layers(), layers()
    whole, ours = adamw(plain), adamw(parted)
    moments = MomentsOnHost(ours, bucket_bytes)
    for seed in range(3):
        for model in (plain, parted):
            backward(model, seed)
        if seed == 1:  # a parameter without a gradient keeps its moments and its count
            plain[1].weight.grad = parted[1].weight.grad = None
        whole.step()
        moments.step()
        assert all(p.grad is None for p in parted.parameters()), "gradients are given back bucket by bucket"
        plain.zero_grad()
    for theirs, mine in zip(plain.parameters(), parted.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        for name in (*MOMENTS, "step"):
            assert torch.equal(ours.state[mine][name], whole.state[theirs][name]), name
    assert {ours.state[p][name].device.type for p in parted.parameters() for name in MOMENTS} == {"cpu"}


@pytest.mark.parametrize("then", [False, True])
def test_a_checkpoint_is_read_with_and_without_offload(tmp_path: Path, then: bool) -> None:
    """Where the moments wait is no property of a run: written with and read without, and the other way round."""
    config = OptimizerConfig(lr=1e-2)
    checkpoints = Checkpoints(tmp_path, CheckpointIdentity(run_id="r", policy="p"), 2, Ranks.single())
    first = train_step(algorithm(), optimizer=config, offload=not then)
    first.run(rank_batch(training_sequences(8)))
    checkpoints.save(1, first.model, first.optimizer)
    second = train_step(algorithm(), optimizer=config, offload=then)
    checkpoints.load(1, second.model, second.optimizer)
    for step in (first, second):
        step.run(rank_batch(training_sequences(8, seed=1)))
    for left, right in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(left, right)
