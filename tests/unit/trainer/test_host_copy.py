"""Copies into host memory are exact for all sizes of tensors and buffers."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from services.trainer import publish
from services.trainer.publish import HostCopier

SIZES = (1, 5000, 2048, 0, 20_003)  # more pieces than buffers


class Late(ThreadPoolExecutor):
    """Empties a buffer when other pieces are on their way: one that is filled again before would show."""

    def submit(self, copy: Any, *arguments: Any) -> Any:  # type: ignore[override]
        def late() -> Any:
            time.sleep(0.002)
            return copy(*arguments)

        return super().submit(late)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_element_arrives_cast(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For "cuda" the staging is real and only the device is not."""
    empty = torch.empty

    def unpinned(*arguments: Any, pin_memory: bool = False, **settings: Any) -> torch.Tensor:
        return empty(*arguments, **settings)

    monkeypatch.setattr(publish, "_STAGED_BYTES", 1 << 12)
    monkeypatch.setattr(torch, "empty", unpinned)
    monkeypatch.setattr(publish, "ThreadPoolExecutor", Late)
    sources = [torch.randn(size) for size in SIZES]
    for dtype in (torch.bfloat16, torch.float32):
        targets = [torch.zeros(len(source), dtype=dtype) for source in sources]
        HostCopier(torch.device(device)).copy(zip(sources, targets, strict=True))
        for source, target in zip(sources, targets, strict=True):
            assert torch.equal(source.to(dtype), target)
