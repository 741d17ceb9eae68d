"""Updates SGLang's servers with tensors in their own memory: over CUDA IPC on GPUs, in shared memory on a CPU.

    bucket of the stage -> buffer on the device of each rank -> handles -> the server copies into its parameters

The handles travel as a pickle, which the server's own unpickler restricts to tensors. A server counts its devices from 0, and this
process may see others, so a handle names the rank's device as the server does. ``disk`` lets the server read the file tensor by
tensor; here each GPU gets whole buckets in one copy, for one bucket of its memory and a CUDA context of this process.
"""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.multiprocessing
from torch.multiprocessing import reductions

from services.common.errors import in_buckets
from services.inference.engine.served.client import Refused
from services.inference.engine.served.fleet import Transfer
from services.inference.engine.served.stage import Stage, StagedTensor

AnyClient = Any  # a ``SglangClient``: its module loads this one, so the type is not imported
BUCKET_BYTES = 1 << 30  # of one call: in a buffer of each device, or held by the server beside its weights
DEVICE_PLACE = 6  # of ``storage_device`` among the arguments of ``rebuild_cuda_tensor``
_ALIGNED = 256  # bytes between tensors of a buffer, for every type


class TensorTransfer(Transfer):
    """Each client names the devices of its server's ranks, as this process sees them."""

    way = "tensors"

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self._buffers: dict[str, torch.Tensor] = {}

    async def load(self, client: AnyClient, version: int, *, flush: bool) -> str:
        shapes = self.stage.shapes
        buckets = list(in_buckets(shapes, lambda name: _aligned(shapes[name].bits.nbytes), BUCKET_BYTES))
        largest = max(sum(_aligned(shapes[name].bits.nbytes) for name in names) for names in buckets)
        try:
            await client.begin_update()
        except Refused:  # an aborted update has left its session open
            await client.end_update()
            await client.begin_update()
        for number, names in enumerate(buckets, 1):
            payloads = await asyncio.to_thread(self._packed, client.devices, names, largest)
            await client.update_from_tensors(payloads, version, flush=flush and number == len(buckets))
        await client.end_update()
        return ""

    def _packed(self, devices: Sequence[str], names: Sequence[str], size_bytes: int) -> list[str]:
        """A bucket in each rank's memory, as one payload per rank."""
        shapes = self.stage.shapes
        payloads = []
        for rank, device in enumerate(devices):
            rows = placed(self._buffer(device, size_bytes), {name: shapes[name] for name in names})
            if device != "cpu":
                torch.cuda.synchronize(device)  # the server reads as soon as it has the handles
            payloads.append(handles(rows, rank))
        return payloads

    def _buffer(self, device: str, size_bytes: int) -> torch.Tensor:
        """Kept over updates: the server may hold handles of the one before."""
        if device not in self._buffers:
            self._buffers[device] = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        return self._buffers[device]


def placed(buffer: torch.Tensor, tensors: dict[str, StagedTensor]) -> list[tuple[str, torch.Tensor]]:
    """Copy tensors into a buffer of bytes; returns them as views of it."""
    rows, start = [], 0
    for name, staged in tensors.items():
        size = staged.bits.nbytes
        part = buffer[start : start + size]
        part.copy_(torch.from_numpy(staged.bits.view("u1")))
        rows.append((name, part.view(getattr(torch, staged.dtype)).view(staged.shape)))
        start += _aligned(size)
    return rows


def handles(rows: Sequence[tuple[str, torch.Tensor]], rank: int) -> str:
    """The tensors of one rank for ``update_weights_from_tensor``: a pickle of (name, handle), in base64."""
    buffer = io.BytesIO()
    strategy = torch.multiprocessing.get_sharing_strategy()
    # File descriptors would need a server of multiprocessing in this process, and its key at the other.
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        ForkingPickler(buffer).dump(
            [(name, _Handle(tensor, rank) if tensor.is_cuda else tensor) for name, tensor in rows]
        )
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)
    return base64.b64encode(buffer.getvalue()).decode()


class _Handle:
    """Pickled as a CUDA tensor on the device with the number ``rank`` of the reader."""

    def __init__(self, tensor: torch.Tensor, rank: int) -> None:
        self._tensor = tensor
        self._rank = rank

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return on_device(reductions.reduce_tensor(self._tensor), self._rank)


def on_device(
    reduced: tuple[Callable[..., Any], tuple[Any, ...]], device: int
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A reduced CUDA tensor with another number for its device."""
    rebuild, arguments = reduced
    return rebuild, (*arguments[:DEVICE_PLACE], device, *arguments[DEVICE_PLACE + 1 :])


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
