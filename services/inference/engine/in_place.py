"""Changes a model's weights in place: values are prepared beforehand, so that the pause covers only the writing.

    prepare (any thread)  check names and shapes, cast values to the model's type, move them to its device
    apply (engine thread) scatter changed elements, copy whole tensors

Independent of requests, versions and caches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from services.common.weights.codec import ChunkChange
from services.common.weights.snapshot import Bits, element_type
from services.inference.engine.base import WeightUpdate, check_update
from services.inference.engine.threads import SCATTERED_BYTES, run_all

# numpy scatters into a tensor's memory about 1.5 times faster than torch's index_copy_ does, and copies bfloat16 twice as
# fast as copy_; it has no bfloat16.
_SIGNED = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, slots=True)
class PreparedUpdate:
    """Ready to be written. Writes to host memory may run in several threads; each of them names the bytes that it touches."""

    version: int
    on_host: list[tuple[Callable[[], object], int]]
    others: list[Callable[[], object]]  # to a device, or from another type

    def apply(self) -> None:
        touched = sum(num_bytes for _, num_bytes in self.on_host)
        run_all([write for write, _ in self.on_host], touched_bytes=touched, name="engine.write")
        for write in self.others:
            write()


def prepare(update: WeightUpdate, weights: Mapping[str, torch.Tensor]) -> PreparedUpdate:
    """``weights`` are the model's own. ``ModelMismatchError`` for a missing or unknown name or another shape."""
    check_update(update, weights)
    prepared = PreparedUpdate(update.version, on_host=[], others=[])
    for name, tensor in update.whole.items():
        values = tensor if isinstance(tensor, torch.Tensor) else torch.from_numpy(tensor)
        _copy(prepared, weights[name], values)
    for name, changes in update.changes.items():
        _change(prepared, weights[name], changes, update.dtype)
    return prepared


def _change(prepared: PreparedUpdate, own: torch.Tensor, changes: Sequence[ChunkChange], dtype: str) -> None:
    flat = own.view(-1)
    for change in changes:
        if change.positions is None:
            target = flat[change.start : change.start + len(change.values)]
            _copy(prepared, target, _cast(change.values, dtype, own))
    scattered = [(change, change.positions) for change in changes if change.positions is not None]
    if not scattered:
        return
    if own.device.type != "cpu":  # which wants few calls
        positions = np.concatenate([positions + change.start for change, positions in scattered])
        values = _cast(np.concatenate([change.values for change, _ in scattered]), dtype, own)
        prepared.others.append(partial(flat.index_copy_, 0, torch.from_numpy(positions).to(own.device), values))
        return
    # Chunk by chunk, with the decoded positions: only a cast of the values copies data.
    signed = _SIGNED[own.element_size()]
    shared = flat.view(signed).numpy()
    for change, positions in scattered:
        bits = _cast(change.values, dtype, own).view(signed).numpy()
        write = partial(shared[change.start :].__setitem__, positions, bits)
        prepared.on_host.append((write, SCATTERED_BYTES * len(positions)))


def _copy(prepared: PreparedUpdate, target: torch.Tensor, values: torch.Tensor) -> None:
    """Consecutive elements of a tensor, or the whole tensor."""
    on_host = target.device.type == values.device.type == "cpu"
    alike = target.dtype == values.dtype and target.is_contiguous() and values.is_contiguous()
    signed = _SIGNED.get(target.element_size())
    if not on_host or not alike or signed is None:
        prepared.others.append(partial(target.copy_, values))
        return
    to, bits = (tensor.detach().view(-1).view(signed).numpy() for tensor in (target, values))
    prepared.on_host.append((partial(np.copyto, to, bits), 2 * bits.nbytes))


def _cast(bits: Bits, dtype: str, own: torch.Tensor) -> torch.Tensor:
    """Bits of the published type as values of the model's type, on its device."""
    published: torch.dtype = getattr(torch, dtype)
    signed = np.ascontiguousarray(bits).view(f"i{element_type(dtype).size_bytes}")
    if not signed.flags.writeable:
        signed = signed.copy()  # a view of received bytes: torch wants memory that may be written
    return torch.from_numpy(signed).view(published).to(device=own.device, dtype=own.dtype)
