"""Copies tensors into host memory, cast on the way: straight from the CPU, through pinned buffers from a GPU.

Knows nothing about what the tensors are, or whose memory they go to.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

_STAGED_BYTES = 64 << 20  # of each of two pinned buffers


@dataclass(frozen=True, slots=True)
class _Staged:
    ready: torch.cuda.Event
    data: torch.Tensor
    target: torch.Tensor

    def land(self) -> None:
        self.ready.synchronize()
        self.target.copy_(self.data)


class HostCopier:
    """Owns the pinned buffers of one device; none for the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[torch.Tensor] = []

    def copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Each source, flat and on the device, into its target, flat, on the CPU and of as many elements.

        Everything is there when it returns. From a GPU, one buffer is filled while the other is emptied.
        """
        if self._device.type == "cpu":
            for source, target in pairs:
                target.copy_(source)
            return
        previous: _Staged | None = None
        turn = 0
        for source, target in pairs:
            step = _STAGED_BYTES // target.element_size()
            for start in range(0, len(source), step):
                staged = self._stage(source[start : start + step], target[start : start + step], turn)
                turn = 1 - turn
                if previous is not None:
                    previous.land()
                previous = staged
        if previous is not None:
            previous.land()

    def _stage(self, source: torch.Tensor, target: torch.Tensor, turn: int) -> _Staged:
        if not self._buffers:
            self._buffers = [torch.empty(_STAGED_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        data = self._buffers[turn].view(target.dtype)[: len(target)]
        data.copy_(source.to(target.dtype), non_blocking=True)
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(self._device))
        return _Staged(ready, data, target)
