"""Checkpoints: bit-equal resumption, whole or absent, retention, refusal of another model, a disk without room."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from services.common.config.training import OptimizerConfig
from services.common.errors import ModelMismatchError
from services.trainer.checkpoints import CheckpointFailedError, Checkpoints
from services.trainer.ranks import Ranks
from services.trainer.step import TrainStep
from tests.unit.trainer.building import algorithm, tiny_causal_lm, train_step

IDENTITY = ("r", "p")


def make_step(**settings: Any) -> TrainStep:
    optimizer = OptimizerConfig(lr=1e-2, schedule="linear", total_updates=12)
    return train_step(algorithm(), optimizer=optimizer, causal_lm=tiny_causal_lm(**settings))


def open_in(directory: Path, keep: int = 2, identity: tuple[str, str] = IDENTITY) -> Checkpoints:
    return Checkpoints(directory, *identity, keep, Ranks.single())


def weights(step: TrainStep) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in step.model.named_parameters()}


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


@pytest.mark.parametrize(
    ("identity", "settings", "words"),
    [
        (("other", "p"), {}, "belongs to run_id 'r', not to 'other'"),
        (("r", "q"), {}, "belongs to policy 'p', not to 'q'"),
        (IDENTITY, {"tied": False}, "checkpoint of another model: causal_lm.lm_head.weight is missing there"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(
    tmp_path: Path, identity: tuple[str, str], settings: dict[str, Any], words: str
) -> None:
    step, other = make_step(), make_step(**settings)
    open_in(tmp_path).save(1, step.model, step.optimizer)
    before = weights(other)
    with pytest.raises(ModelMismatchError, match=words):
        open_in(tmp_path, identity=identity).load(1, other.model, other.optimizer)
    assert_same(before, weights(other))


def test_no_free_disk_is_reported_before_the_first_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, checkpoints = make_step(), open_in(tmp_path)
    checkpoints.save(1, step.model, step.optimizer)
    full = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(CheckpointFailedError, match="no free disk: it needs about"):
        checkpoints.save(2, step.model, step.optimizer)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]


def test_lost_bytes_are_noticed_before_an_older_checkpoint_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that reports success and stores other bytes."""
    step, checkpoints = make_step(), open_in(tmp_path, keep=1)
    checkpoints.save(1, step.model, step.optimizer)
    write = os.write

    def loses_a_bit(fd: int, data: memoryview) -> int:
        return write(fd, bytes([data[0] ^ 1, *data[1:]]))

    monkeypatch.setattr(os, "write", loses_a_bit)
    with pytest.raises(CheckpointFailedError, match="the disk has not kept the written bytes: "):
        checkpoints.save(2, step.model, step.optimizer)
    monkeypatch.undo()
    other = make_step(seed=3)
    assert open_in(tmp_path).restore(other.model, other.optimizer) == 1
    assert_same(weights(step), weights(other))
