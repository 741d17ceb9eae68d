"""Sends weights through a gloo group of this process (rank 0) and the ranks of one server; one group per server start.

SGLang builds the server's half with torch's own helper: a gloo backend, found through a store under the group's name. This
module builds the other half by hand, because the helper needs a process that has joined a default group, and changes that
group. The tensors are in host memory; gloo copies them to the device that the server asked for.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import structlog
import torch
import torch.distributed as dist

from services.common.buckets import in_buckets
from services.common.errors import InfrastructureError
from services.inference.engine.served.stage import Stage
from services.inference.engine.sglang.client import SglangClient, TensorRow
from services.inference.engine.sglang.sessions import begun_update

T = TypeVar("T")

log = structlog.get_logger(__name__)

GROUP_TIMEOUT_S = 60.0  # for a rank that does not join, or does not receive an announced tensor
BUCKET_BYTES = 1 << 30  # tensors of one announcement: the server holds them beside its weights
FIRST_DEVICE = "cpu"  # gloo serves several kinds; torch makes one backend for all, under the first one's name
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class _Group:
    name: str
    store: Any  # kept: the ranks find each other through the store
    backend: Any  # the one for the server's device


class BroadcastTransfer:
    """``num_ranks`` of each server (tensor parallel)."""

    way = "broadcast"

    def __init__(self, stage: Stage, num_ranks: int) -> None:
        self._stage = stage
        self.size_bytes = stage.size_bytes * num_ranks
        self._num_ranks = num_ranks
        self._groups: dict[SglangClient, _Group] = {}

    async def load(self, client: SglangClient, version: int, *, flush: bool) -> str:
        self._groups = {known: group for known, group in self._groups.items() if not known.closed}
        if (group := self._groups.get(client)) is None:
            group = self._groups[client] = await self._form(client)
        try:
            await begun_update(client)
            shapes = self._stage.shapes
            buckets = list(in_buckets(shapes, lambda name: shapes[name].bits.nbytes, BUCKET_BYTES))
            for number, names in enumerate(buckets, 1):
                last = number == len(buckets)
                await self._send(client, group, names, version, flush=flush and last)
            await client.end_update()
        except BaseException:
            del self._groups[client]  # its state is unknown
            raise
        return ""

    async def _form(self, client: SglangClient) -> _Group:
        name = f"rollmill-{next(_numbers)}"
        store = dist.TCPStore(
            "127.0.0.1", 0, self._num_ranks + 1, True, timedelta(seconds=GROUP_TIMEOUT_S), wait_for_workers=False
        )
        joined = client.join_group(name, store.port, self._num_ranks + 1, GROUP_TIMEOUT_S)
        backend = await _run_both(joined, asyncio.to_thread(self._backend, name, store))
        log.info("sglang.group", server=client.address, group=name, ranks=self._num_ranks + 1)
        return _Group(name, store, backend)

    def _backend(self, name: str, store: Any) -> Any:
        gloo: Any = dist.ProcessGroupGloo  # its options are not in torch's type stubs
        options = gloo._Options()
        options._devices = [gloo.create_device(interface="lo")]
        options._timeout = timedelta(seconds=GROUP_TIMEOUT_S)
        for prefix in (name, f"{name}/", f"{FIRST_DEVICE}/"):  # as SGLang and torch nest them
            store = dist.PrefixStore(prefix, store)
        try:
            return gloo(store, 0, self._num_ranks + 1, options)
        except RuntimeError as error:
            raise InfrastructureError(f"the group {name} was not formed: {error}") from error

    async def _send(
        self, client: SglangClient, group: _Group, names: Sequence[str], version: int, *, flush: bool
    ) -> None:
        shapes = self._stage.shapes
        rows = [TensorRow(name=name, dtype=shapes[name].dtype, shape=shapes[name].shape) for name in names]
        received = client.update_from_group(group.name, rows, version, flush=flush)
        await _run_both(received, asyncio.to_thread(self._broadcast, group, names))

    def _broadcast(self, group: _Group, names: Sequence[str]) -> None:
        shapes = self._stage.shapes
        try:
            for name in names:
                tensor = torch.from_numpy(shapes[name].bits.view("i1"))
                group.backend.broadcast(tensor, 0).wait()
        except RuntimeError as error:  # gloo's error for a dead or late peer
            raise InfrastructureError(f"the group {group.name} broke: {error}") from error


async def _run_both(server: Coroutine[Any, Any, None], here: Coroutine[Any, Any, T]) -> T:
    """Run both halves; returns the local result. A local failure cancels the server's half, which would wait for the local."""
    asked = asyncio.ensure_future(server)
    try:
        done = await here
    except BaseException:
        asked.cancel()
        failure = (await asyncio.gather(asked, return_exceptions=True))[0]
        if isinstance(failure, Exception):
            raise failure from None  # the server's error is more precise
        raise
    await asked
    return done
