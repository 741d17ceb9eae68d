"""Ranks of a trainer: the process group, its reductions, and the sharding of parameters.

One rank needs no process group and no FSDP; several ranks shard every layer and the root with FSDP2 over gloo (CPU)
or NCCL (GPU). Independent of losses, batches and files.

``HostGroup`` exchanges short texts over gloo on the hosts, for an action of one rank (such as reserving a file) with a
result for all ranks. Each exchange has a name and its own deadline, shorter than that of the training's collectives, in
which ranks wait for batches.

The errors of collectives say whether another rank is lost (``peer_loss``). A rank that loses a peer must start again with
all others. The rank logs the loss and exits with ``services.common.system.child.START_AGAIN``, which launchers distinguish
from a refusal.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import orjson
import structlog
import torch
import torch.distributed as dist
from torch.distributed import DistNetworkError, DistStoreError, TCPStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from services.common.errors import DeadlineError, InfrastructureError, RollmillError

log = structlog.get_logger()
TIMEOUT_S = 300.0
T = TypeVar("T")
_GLOO = "gloo"
_GLOO_WORDS = ("closed by peer", "reset by peer", "broken pipe", "timed out", "connection refused", "connect timeout")


@dataclass(frozen=True, slots=True)
class Ranks:
    """The training process group, or a single process without a group. Every method is a collective."""

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
        if self.world_size == 1:
            return values
        result = values.to(self.device, copy=True)
        dist.all_reduce(result)
        return result

    def max(self, *values: int) -> list[int]:
        """The maximum of each value over ranks, the same on each."""
        if self.world_size == 1:
            return list(values)
        result = torch.tensor(values, dtype=torch.int64, device=self.device)
        dist.all_reduce(result, op=dist.ReduceOp.MAX)
        return [int(value) for value in result.tolist()]

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """All ranks' values end to end, in rank order; the lengths may differ. [n_rank] -> [sum of n_rank]"""
        if self.world_size == 1:
            return values
        return torch.cat(_gathered(values, self.world_size))


def _gathered(values: torch.Tensor, world_size: int, group: Any = None) -> list[torch.Tensor]:
    """All ranks' values, in rank order; the lengths may differ."""

    def everywhere(own: torch.Tensor) -> list[torch.Tensor]:
        rows = [torch.empty_like(own) for _ in range(world_size)]
        dist.all_gather(rows, own, group=group)
        return rows

    sizes = [int(size) for size in everywhere(torch.tensor([len(values)], device=values.device))]
    padded = values.new_zeros(max(1, *sizes))
    padded[: len(values)] = values
    return [row[:size] for row, size in zip(everywhere(padded), sizes, strict=True)]


def init_ranks(*, timeout_s: float, device: str | None = None, always_group: bool = False) -> Ranks:
    """Join the group that torchrun's environment describes. A single rank gets a group only with ``always_group``.

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
    """Leave the group, if there is one: the runtime aborts a process that exits with threads of the group alive."""
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
    """Shard each layer, then the rest with the root, in place. No change for one rank in its own precision.

    ``compute_dtype`` gathers parameters in that type for forward and backward; gradients are reduced in float32 and
    the sharded (master) parameters keep their own type. ``offload`` keeps the shards on the host (in pinned memory for a
    GPU) and copies each layer to the device when the layer is gathered. ``exact`` modules are sharded separately and
    compute in the type of their own parameters.
    """
    if ranks.world_size == 1 and compute_dtype is None and not offload:
        return
    mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
    policy = MixedPrecisionPolicy()
    if compute_dtype is not None:
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    # Pinned memory has no use without a GPU.
    where = CPUOffloadPolicy(pin_memory=ranks.device.type != "cpu") if offload else OffloadPolicy()
    for module in exact:
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False), offload_policy=where)
    for module in layers:
        fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=where)
    # By default the root stays gathered after its forward pass, for the backward pass. A frozen model has none: embedding
    # and head would stay whole on every rank.
    trained = any(parameter.requires_grad for parameter in root.parameters())
    fully_shard(
        root, mesh=mesh, mp_policy=policy, offload_policy=where, reshard_after_forward=None if trained else True
    )


def reshard(root: torch.nn.Module) -> None:
    """Free what a forward pass without a backward pass has gathered: the root's parameters are its shards again."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a sharded tensor (a collective); returns any other tensor unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_rows(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """This process's rows of a tensor, sharing its memory, and the index of the first of these rows.

    A sharded tensor is cut along dimension 0 like ``torch.chunk``: equal shares of rows, rounded up, the last ones
    shorter or empty. Any other tensor is whole on each rank. No communication.
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
    """``local_rows``, flat, and the offset of the first element in the flat tensor.

    The first rank owns a tensor that every rank holds whole.
    """
    rows, first = local_rows(tensor)
    flat = rows.reshape(-1)
    if not isinstance(tensor, DTensor) and not ranks.is_first:
        flat = flat[:0]
    return flat, first * math.prod(tensor.shape[1:])


def even_shares(items: Iterable[T], size: Callable[[T], int], num_ranks: int) -> list[list[T]]:
    """The items of each rank, with about the same total size: the largest first, each to the rank with the least."""
    shares: list[list[T]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for item in sorted(items, key=size, reverse=True):
        rank = loads.index(min(loads))
        shares[rank].append(item)
        loads[rank] += size(item)
    return shares


def whole_tensors(
    tensors: Mapping[str, torch.Tensor], ranks: Ranks, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield (name, whole tensor in ``dtype`` on the CPU) on rank 0, (name, None) on other ranks, which must iterate too.

    Peak extra memory is one tensor.
    """
    for name, weight in tensors.items():
        whole = full(weight)
        # A copy even without a cast: the publisher may hold the copy during the next update.
        yield name, whole.to(device="cpu", dtype=dtype, copy=True) if ranks.is_first else None


class PeerLostError(InfrastructureError):
    """Another rank of this trainer died, or its node cannot be reached."""


def peer_loss(error: BaseException) -> PeerLostError | None:
    """The error as ``PeerLostError``; None for an error with another cause.

    gloo raises a plain ``RuntimeError`` in the running collective; NCCL and the store have their own types.
    """
    if isinstance(error, PeerLostError):
        return error
    text = str(error)
    known = isinstance(error, (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError))
    if not known and not (_GLOO in text.lower() and any(word in text.lower() for word in _GLOO_WORDS)):
        return None
    first_line = next(iter(text.strip().splitlines()), type(error).__name__)
    return PeerLostError(f"another rank of this trainer is lost, or its node cannot be reached: {first_line}")


class HostGroup:
    """The group of all ranks over gloo. The constructor and every method are collectives."""

    def __init__(self, ranks: Ranks, timeout_s: float = TIMEOUT_S) -> None:
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._group = None
        if ranks.world_size > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def gather(self, text: str, wait: str) -> list[str]:
        """Every rank's text, in rank order.

        Raises:
            DeadlineError: a rank did not join the exchange named ``wait``.
            PeerLostError: a rank died.
        """
        if self._group is None:
            return [text]
        encoded = torch.frombuffer(bytearray(text.encode() + b"\0"), dtype=torch.uint8)[:-1]
        try:
            rows = _gathered(encoded, self._ranks.world_size, self._group)
        except RuntimeError as error:  # gloo raises only this type, for both errors
            if "timed out" in str(error).lower():
                raise DeadlineError(
                    f"{wait} took longer than {self._timeout_s:g} s: not all of {self._ranks.world_size} ranks joined",
                    wait=wait,
                ) from error
            raise PeerLostError(f"{wait}: a rank was lost: {error}") from error
        return [row.numpy().tobytes().decode() for row in rows]

    def agree(self, wait: str, work: Callable[[], str], error: type[RollmillError] = InfrastructureError) -> list[str]:
        """Run ``work`` on every rank and gather the results, as a barrier.

        Raises ``error``, with the same message on every rank, when the work raises ``RollmillError`` or ``OSError`` on one
        of them. Any other exception is a bug: the exception ends this rank, and so the others.
        """
        if self._group is None:
            return [work()]
        failure: RollmillError | OSError | None = None
        own = {}
        try:
            own["result"] = work()
        except (RollmillError, OSError) as caught:
            failure = caught
            own["failed"] = caught.message if isinstance(caught, RollmillError) else str(caught)
        answers = [orjson.loads(text) for text in self.gather(orjson.dumps(own).decode(), wait)]
        failed = [f"rank {rank}: {answer['failed']}" for rank, answer in enumerate(answers) if "failed" in answer]
        if failed:
            raise error(f"{wait}: {'; '.join(failed)}") from failure
        return [str(answer["result"]) for answer in answers]


# --- Detects lost nodes of a trainer: the launcher of each node increments a heartbeat counter in the rendezvous store.


BEAT_S = 2.0
END_TOGETHER_S = 5.0  # time for our ranks to end by themselves after those of another node
_CALL_S = 20.0


class NodeWatch:
    """Thread beside torchrun's launcher that ends this process's ranks by SIGTERM when a node is lost."""

    def __init__(
        self, host: str, port: int, node_rank: int, num_nodes: int, meet_s: float, lost_after_s: float
    ) -> None:
        self._place = (host, port)
        self._node_rank = node_rank
        self._others = [node for node in range(num_nodes) if node != node_rank]
        self._meet_s = meet_s
        self._lost_after_s = lost_after_s
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._store: TCPStore | None = None
        self.lost: str | None = None  # the reason, when this watch has ended the ranks
        self._thread = threading.Thread(target=self._run, name="nodes.watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, failed: bool = False) -> None:
        """Stop the watch. ``failed`` tells the other nodes that the ranks of this node died."""
        with self._lock:
            self._stopped.set()
            if failed and self._store is not None:
                try:
                    self._store.add(_key(self._node_rank, "gone"), 1)
                except (DistNetworkError, DistStoreError):
                    pass  # the other nodes notice the loss of the store as well

    def _run(self) -> None:
        try:
            store = TCPStore(
                *self._place, is_master=False, timeout=timedelta(seconds=self._meet_s), wait_for_workers=False
            )
            store.set_timeout(timedelta(seconds=_CALL_S))
            with self._lock:
                self._store = store
            reason, grace_s = self._beat(store)
        except (DistNetworkError, DistStoreError) as error:
            # torchrun waits at the same store and reports the loss as well.
            reason, grace_s = f"node 0 is lost: {str(error).splitlines()[0]}", END_TOGETHER_S
        if reason and not self._stopped.wait(grace_s):
            with self._lock:
                if not self._stopped.is_set():
                    self.lost = reason
                    sys.stderr.write(f"trainer: {reason}; ending the ranks of this node\n")
                    os.kill(os.getpid(), signal.SIGTERM)

    def _beat(self, store: TCPStore) -> tuple[str, float]:
        """Beat until stopped or until a node is lost; returns the reason and the time that our ranks have to end."""
        heard: dict[int, tuple[int, float]] = {}
        while True:  # the first beat at once: a node that is lost without one counts as one that never joined
            store.add(_key(self._node_rank, "beats"), 1)
            now = time.monotonic()
            for node in self._others:
                if store.add(_key(node, "gone"), 0):
                    return f"the ranks of node {node} have died", END_TOGETHER_S
                count = store.add(_key(node, "beats"), 0)
                if node not in heard or heard[node][0] != count:
                    heard[node] = (count, now)
                elif count and now - heard[node][1] > self._lost_after_s:
                    # torchrun waits for a node that never joined.
                    return f"node {node} sent no heartbeat for {self._lost_after_s:g} s", 0.0
            if self._stopped.wait(BEAT_S):
                return "", 0.0


def _key(node: int, what: str) -> str:
    return f"rollmill/nodes/{node}/{what}"


# --- Makes a rank leave on a signal, also while its main thread is inside a collective.


SIGNALS = (signal.SIGTERM, signal.SIGINT)


def leave_on_signal(leave: Callable[[], object]) -> None:
    """From now on the first SIGTERM or SIGINT calls ``leave``, from a thread. Call from the main thread.

    A rank that waits in a collective for a lost one does not end by itself; its launcher kills the rank after its grace.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)  # set_wakeup_fd requires it

    def wait() -> None:
        while (number := os.read(reader, 1)[0]) not in SIGNALS:
            pass
        log.info("trainer.leaving", signal=signal.Signals(number).name)
        leave()

    threading.Thread(target=wait, name="signals", daemon=True).start()
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in SIGNALS:
        signal.signal(number, lambda *_: None)  # the default would end the process
