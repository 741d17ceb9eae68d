"""Ranks: who takes part in training, what they add up, and how parameters are spread over them.

One rank needs no process group and no FSDP; several ranks shard every layer and the root with FSDP2 over gloo (CPU)
or NCCL (GPU). It knows nothing about losses, batches or files.

Gradients: FSDP2 *averages* over ranks, while a minibatch's loss is a *sum* of the ranks' shares. ``Ranks.backward``
compensates, so that callers never think of it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from services.common.models import named_weights


@dataclass(frozen=True, slots=True)
class Ranks:
    """The training process group, or a single process without one. Every method is a collective."""

    rank: int
    world_size: int
    device: torch.device

    @classmethod
    def single(cls, device: torch.device | str = "cpu") -> Ranks:
        return cls(rank=0, world_size=1, device=torch.device(device))

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Elementwise sum over ranks, the same on each."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: torch.Tensor) -> torch.Tensor:
        """Elementwise maximum over ranks, the same on each."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """All ranks' values end to end, in rank order; the lengths may differ. [n_rank] -> [sum of n_rank]"""
        if self.world_size == 1:
            return values
        sizes = torch.zeros(self.world_size, dtype=torch.int64, device=self.device)
        sizes[self.rank] = len(values)
        counts = self.sum(sizes).tolist()
        padded = values.new_zeros(max(counts))
        padded[: len(values)] = values
        rows = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(rows, padded)
        return torch.cat([row[:count] for row, count in zip(rows, counts, strict=True)])

    def backward(self, loss_share: torch.Tensor) -> None:
        """Accumulate the gradient of the *sum* of all ranks' shares."""
        (loss_share * self.world_size if self.world_size > 1 else loss_share).backward()

    def _reduce(self, values: torch.Tensor, op: Any) -> torch.Tensor:
        if self.world_size == 1:
            return values
        result = values.to(self.device, copy=True)
        dist.all_reduce(result, op=op)
        return result


def init_ranks(*, timeout_s: float, device: str | None = None, always_group: bool = False) -> Ranks:
    """Join the group that torchrun's environment describes; alone, no group unless ``always_group``.

    ``timeout_s`` bounds every later collective. FSDP, and so mixed precision, needs a group even on one rank.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    target = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0"))) if kind == "cuda" else torch.device(kind)
    if target.type == "cuda":
        torch.cuda.set_device(target)
    backend = "nccl" if target.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    if world_size > 1:
        dist.init_process_group(backend, timeout=timeout)
    elif always_group:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)  # type: ignore[attr-defined]
    return Ranks(rank=rank, world_size=world_size, device=target)


def leave_ranks() -> None:
    """Leave the group, if there is one: a process that exits with its threads alive is aborted by the runtime."""
    if dist.is_initialized():
        dist.destroy_process_group()


def shard(
    root: torch.nn.Module,
    layers: list[torch.nn.Module],
    ranks: Ranks,
    compute_dtype: torch.dtype | None = None,
    offload: bool = False,
    exact: Seq[torch.nn.Module] = (),
) -> None:
    """Shard each layer, then the rest with the root, in place. Does nothing for one rank in its own precision.

    ``compute_dtype`` gathers parameters in that type for forward and backward; gradients are reduced in float32 and
    the sharded (master) parameters keep their own type. ``offload`` keeps the shards on the host, in pinned memory
    beside a GPU, and brings each layer over when it is gathered. ``exact`` modules are sharded apart and compute in the
    type of their own parameters.
    """
    if ranks.world_size == 1 and compute_dtype is None and not offload:
        return
    mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
    policy = MixedPrecisionPolicy()
    if compute_dtype is not None:
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    # Beside a CPU there is nothing to pin for.
    where = CPUOffloadPolicy(pin_memory=ranks.device.type != "cpu") if offload else OffloadPolicy()
    for module in exact:
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False), offload_policy=where)
    for module in (*layers, root):
        fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=where)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor of a sharded one (a collective); any other tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_rows(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The rows that this process holds of a tensor, sharing its memory, and the number of the first of them.

    A sharded tensor is cut along dimension 0 as ``torch.chunk`` cuts: equal shares of rows, rounded up, the last ones
    shorter or empty. Any other tensor is held whole. No communication.
    """
    if not isinstance(tensor, DTensor):
        return tensor, 0
    mesh = tensor.device_mesh
    assert mesh.ndim == 1 and tuple(tensor.placements) == (Shard(0),), f"sharded in another way: {tensor.placements}"
    num_rows = tensor.shape[0]
    share = -(-num_rows // mesh.size())
    first = min(mesh.get_local_rank() * share, num_rows)
    rows = tensor.to_local()
    assert rows.shape[0] == min(share, num_rows - first), f"a shard of {rows.shape[0]} rows of {num_rows}"
    return rows, first


def own_part(tensor: torch.Tensor, ranks: Ranks) -> tuple[torch.Tensor, int]:
    """``local_rows``, flat, and the place of the first element in the whole, flat.

    A tensor that every rank holds whole is the first rank's.
    """
    rows, first = local_rows(tensor)
    flat = rows.reshape(-1)
    if not isinstance(tensor, DTensor) and not ranks.is_first:
        flat = flat[:0]
    return flat, first * math.prod(tensor.shape[1:])


def full_weights(model: torch.nn.Module, ranks: Ranks, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor | None]]:
    """(name, whole tensor in ``dtype`` on the CPU) one at a time; None on ranks other than 0, which must iterate too.

    Tied weights appear once, under their first name. Peak extra memory is one tensor.
    """
    for name, weight in named_weights(model).items():
        whole = full(weight)
        # A copy even when nothing is cast: the publisher may hold it while the next update runs.
        yield name, whole.to(device="cpu", dtype=dtype, copy=True) if ranks.is_first else None
