"""The directories of snapshots, and the loop's record of a published version."""

from __future__ import annotations

import errno
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from services.common.config.training import WeightsConfig
from services.common.weights import snapshot
from services.common.weights.snapshot import (
    DEFAULT_DIRECTORIES,
    Snapshot,
    SnapshotSpaceError,
)
from services.trainer import publish
from services.trainer.model.policy_model import build_policy_model
from services.trainer.publish import HostCopier, Snapshots, snapshot_directories
from services.trainer.ranks import Ranks
from tests.unit.trainer.building import tiny_causal_lm


def test_snapshots_spill_into_the_run_directory_unless_the_recipe_names_another() -> None:
    assert snapshot_directories(WeightsConfig(), Path("runs/r")) == (*DEFAULT_DIRECTORIES, Path("runs/r/snapshots"))
    named = WeightsConfig(spill_directory="/mnt/spill")
    assert snapshot_directories(named, Path("runs/r")) == (*DEFAULT_DIRECTORIES, Path("/mnt/spill"))


class TakingProcess:
    """A publisher process that takes everything."""

    address = "127.0.0.1:1"

    def __init__(self) -> None:
        self.announced: list[Path] = []

    def announce(self, path: Path) -> None:
        self.announced.append(path)


def snapshots_in(process: Any, *directories: Path) -> Snapshots:
    model, ranks = build_policy_model(tiny_causal_lm(), Ranks.single()), Ranks.single()
    return Snapshots(
        model,
        ranks,
        run_id="r",
        policy="p",
        dtype="bfloat16",
        algorithm="blake3",
        directories=directories,
        process=process,
    )


def test_without_room_anywhere_a_version_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusals = [errno.ENOSPC] * 3
    reserve = os.posix_fallocate

    def no_room_yet(descriptor: int, offset: int, size: int) -> None:
        if refusals:
            raise OSError(refusals.pop(), "no room")
        reserve(descriptor, offset, size)

    monkeypatch.setattr(snapshot.os, "posix_fallocate", no_room_yet)  # type: ignore[attr-defined]
    monkeypatch.setattr(publish, "ROOM_EVERY_S", 0.0)
    process: Any = TakingProcess()
    publisher = snapshots_in(process, tmp_path)
    assert publisher.publish(4) is not None and len(process.announced) == 1 and not refusals

    refusals += [errno.ENOSPC] * 1000
    with pytest.raises(SnapshotSpaceError, match=r"no room for version 5.*Free memory there"):
        publisher.publish(5)
    assert len(process.announced) == 1


def test_a_version_spills_when_shared_memory_is_full_and_its_cost_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, spill = tmp_path / "full", tmp_path / "spill"
    full.mkdir()
    spill.mkdir()
    reserve = os.posix_fallocate

    def no_room(descriptor: int, offset: int, size: int) -> None:
        if str(full) in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(descriptor, offset, size)

    monkeypatch.setattr(snapshot.os, "posix_fallocate", no_room)  # type: ignore[attr-defined]
    process: Any = TakingProcess()
    published = snapshots_in(process, full, spill).publish(4)
    assert published is not None
    [path] = process.announced
    assert path.parent == spill
    manifest = Snapshot(path).manifest
    assert published.version.digest == manifest.digest
    assert published.version.digest.startswith("blake3:")
    assert published.version.sources == ("127.0.0.1:1",)
    assert published.metrics.keys() == {"snapshot_s", "snapshot_digest_s", "snapshot_bytes"}
    assert published.metrics["snapshot_bytes"] == manifest.size_bytes


# -- Copies into host memory are exact for all sizes of tensors and buffers.


SIZES = (1, 5000, 2048, 0, 20_003)  # more pieces than buffers


class LateThreads(ThreadPoolExecutor):
    """Empty a buffer when other pieces are on their way: one that is filled again before would show."""

    def submit(self, task: Any, /, *arguments: Any, **keywords: Any) -> Any:
        def late() -> Any:
            time.sleep(0.002)
            return task(*arguments, **keywords)

        return super().submit(late)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_element_arrives_cast(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For "cuda" the staging is real and only the device is not."""
    empty = torch.empty

    def unpinned(*arguments: Any, pin_memory: bool = False, **settings: Any) -> torch.Tensor:
        return empty(*arguments, **settings)

    monkeypatch.setattr(publish, "_STAGED_BYTES", 1 << 12)
    monkeypatch.setattr(torch, "empty", unpinned)
    monkeypatch.setattr(publish, "ThreadPoolExecutor", LateThreads)
    sources = [torch.randn(size) for size in SIZES]
    for dtype in (torch.bfloat16, torch.float32):
        targets = [torch.zeros(len(source), dtype=dtype) for source in sources]
        HostCopier(torch.device(device)).copy(zip(sources, targets, strict=True))
        for source, target in zip(sources, targets, strict=True):
            assert torch.equal(source.to(dtype), target)
