"""Parked tensors come back with the same bits at the same addresses; their memory is free meanwhile."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

from services.common.system.parking import Parked, Released, return_freed_memory


def test_parked_tensors_come_back_with_their_bits_and_views(tmp_path: Path) -> None:
    torch.manual_seed(0)
    large, small, half = torch.randn(500, 700), torch.randn(7), torch.randn(40_000).to(torch.bfloat16)
    view, array = large[3:], large.numpy()
    before = [tensor.clone() for tensor in (large, small, half)]
    addresses = [tensor.data_ptr() for tensor in (large, small, half)]
    parked = Parked([large, small, half, view], tmp_path)
    assert not large[2:498].any(), "whole pages in between are free"
    parked.restore()
    assert all(torch.equal(found, kept) for found, kept in zip((large, small, half), before, strict=True))
    assert [tensor.data_ptr() for tensor in (large, small, half)] == addresses
    assert array[499, 699] == large[499, 699] and torch.equal(view, before[0][3:])


def test_the_file_of_parked_tensors_has_no_name(tmp_path: Path) -> None:
    """A process that is killed leaves nothing."""
    parked = Parked([torch.ones(10_000)], tmp_path)
    assert os.listdir(tmp_path) == []
    parked.restore()


def test_tensors_that_are_never_restored_close_their_file(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    parked = Parked([torch.ones(10_000)], tmp_path)
    opened = len(os.listdir("/proc/self/fd"))
    del parked
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == opened - 1
    assert not [warning for warning in recwarn if warning.category is ResourceWarning]


def test_without_room_for_the_file_nothing_is_freed(tmp_path: Path) -> None:
    tensor = torch.ones(100_000)
    with pytest.raises(OSError):
        Parked([tensor], tmp_path / "missing")
    assert tensor.all()


def test_released_storages_can_be_written_again() -> None:
    tensor = torch.ones(300, 300)
    released = Released([tensor, tensor[5:]])
    assert not tensor[20:280].any()
    released.restore()
    tensor.copy_(torch.full((300, 300), 2.0))
    assert (tensor == 2.0).all()
    return_freed_memory()
