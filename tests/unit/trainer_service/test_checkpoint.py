"""Checkpoints: bit-equal resumption, whole or absent, retention, refusal of another model, a disk without room."""

from __future__ import annotations

import errno
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from services.common.config.optimizer import OptimizerConfig
from services.common.errors import CorruptDataError, ModelMismatchError
from services.trainer.checkpoint import META, CheckpointFailedError, CheckpointIdentity, Checkpoints
from services.trainer.sharding import Ranks
from services.trainer.step import TrainStep
from tests.unit.trainer.building import algorithm, tiny_causal_lm, train_step
from tests.unit.trainer_service.building import batch_of

IDENTITY = CheckpointIdentity(run_id="r", policy="p")


def make_step(**settings: Any) -> TrainStep:
    optimizer = OptimizerConfig(lr=1e-2, schedule="linear", total_updates=12)
    return train_step(algorithm(), optimizer=optimizer, causal_lm=tiny_causal_lm(**settings))


def open_in(directory: Path, keep: int = 2, identity: CheckpointIdentity = IDENTITY) -> Checkpoints:
    return Checkpoints(directory, identity, keep, Ranks.single())


def weights(step: TrainStep) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in step.model.named_parameters()}


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def test_training_goes_on_bit_for_bit_from_a_checkpoint(tmp_path: Path) -> None:
    straight = make_step()
    for number in (1, 2):
        straight.run(batch_of(number))
    open_in(tmp_path).save(2, straight.model, straight.optimizer)
    for number in (3, 4):
        straight.run(batch_of(number))

    resumed = make_step(seed=9)  # other weights: all must come from the checkpoint
    assert open_in(tmp_path).newest() == 2
    open_in(tmp_path).load(2, resumed.model, resumed.optimizer)
    rates = [resumed.run(batch_of(number)).learning_rate for number in (3, 4)]

    assert_same(weights(straight), weights(resumed))
    assert resumed.optimizer.num_updates == 8
    assert rates[0] > rates[1] > 0  # the schedule goes on where it was


def test_random_state_comes_back(tmp_path: Path) -> None:
    step = make_step()
    torch.manual_seed(5)
    open_in(tmp_path).save(1, step.model, step.optimizer)
    expected = torch.rand(4)
    torch.manual_seed(6)
    open_in(tmp_path).load(1, step.model, step.optimizer)
    assert torch.equal(torch.rand(4), expected)


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    step, checkpoints = make_step(), open_in(tmp_path, keep=2)
    for number in (2, 4, 6):
        checkpoints.save(number, step.model, step.optimizer)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000004", "step_000006"]
    assert checkpoints.before(6) == 4
    assert checkpoints.before(4) is None


def test_a_half_written_checkpoint_does_not_count_and_is_swept(tmp_path: Path) -> None:
    step, checkpoints = make_step(), open_in(tmp_path)
    checkpoints.save(1, step.model, step.optimizer)
    shutil.copytree(tmp_path / "step_000001", tmp_path / "step_000002.partial")
    unfinished = shutil.copytree(tmp_path / "step_000001", tmp_path / "step_000003")
    (unfinished / META).unlink()
    assert checkpoints.newest() == 1
    checkpoints.save(4, step.model, step.optimizer)
    assert not (tmp_path / "step_000002.partial").exists()


@pytest.mark.parametrize(
    ("identity", "settings", "words"),
    [
        (CheckpointIdentity(run_id="other", policy="p"), {}, "belongs to run_id 'r', not to 'other'"),
        (CheckpointIdentity(run_id="r", policy="q"), {}, "belongs to policy 'p', not to 'q'"),
        (IDENTITY, {"tied": False}, "checkpoint of another model: causal_lm.lm_head.weight is missing there"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(
    tmp_path: Path, identity: CheckpointIdentity, settings: dict[str, Any], words: str
) -> None:
    step, other = make_step(), make_step(**settings)
    open_in(tmp_path).save(1, step.model, step.optimizer)
    before = weights(other)
    with pytest.raises(ModelMismatchError, match=words):
        open_in(tmp_path, identity=identity).load(1, other.model, other.optimizer)
    assert_same(before, weights(other))


def test_an_unreadable_checkpoint_says_which(tmp_path: Path) -> None:
    step = make_step()
    open_in(tmp_path).save(1, step.model, step.optimizer)
    for file in (tmp_path / "step_000001").glob("*.distcp"):
        file.write_bytes(b"")
    with pytest.raises(CorruptDataError, match="step_000001 cannot be read"):
        open_in(tmp_path).load(1, step.model, step.optimizer)


def test_no_free_disk_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, checkpoints = make_step(), open_in(tmp_path)
    checkpoints.save(1, step.model, step.optimizer)
    full = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(CheckpointFailedError, match="no free disk: it needs about"):
        checkpoints.save(2, step.model, step.optimizer)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]


FULL = [
    OSError(errno.ENOSPC, "No space left on device"),
    # As it arrives from another rank, without what led to it.
    RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"),
]


@pytest.mark.parametrize("error", FULL, ids=["the system's word", "torch's word"])
def test_a_disk_that_fills_up_meanwhile_leaves_the_older_checkpoint(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch.distributed.checkpoint.filesystem as filesystem

    step, checkpoints = make_step(), open_in(tmp_path)
    checkpoints.save(1, step.model, step.optimizer)

    def full(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(filesystem, "_write_item", full)
    with pytest.raises(CheckpointFailedError, match=re.escape(str(error))):
        checkpoints.save(2, step.model, step.optimizer)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]
    checkpoints.save(2, step.model, step.optimizer)
    assert checkpoints.newest() == 2
