"""Weights by a gloo group of this process (rank 0) and the ranks of one server, formed once for each life of a server.

The server's half is made by SGLang with torch's own helper: a gloo backend, found through a store under the
group's name. This is the other half, made by hand, because the helper wants a process that has
joined a default group and leaves its traces there. The tensors lie in host memory; gloo brings them to wherever the
server asked for them.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import structlog
import torch
import torch.distributed as dist

from services.common.errors import InfrastructureError
from services.inference.engine.sglang.client import Refused, SglangClient, TensorRow
from services.inference.engine.sglang.stage import Stage

T = TypeVar("T")

log = structlog.get_logger(__name__)

GROUP_TIMEOUT_S = 60.0  # for a rank that does not come, or does not take what it was announced
BUCKET_BYTES = 1 << 30  # tensors of one announcement: the server holds them beside its weights
FIRST_DEVICE = "cpu"  # gloo serves several kinds; torch makes one backend for all, under the first one's name
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class _Group:
    name: str
    store: Any  # kept: the ranks find each other through it
    backend: Any  # the one for the server's device


class ByBroadcast:
    """``num_ranks`` of each server (tensor parallel)."""

    def __init__(self, stage: Stage, num_ranks: int) -> None:
        self._stage = stage
        self._num_ranks = num_ranks
        self._groups: dict[SglangClient, _Group] = {}

    async def load(self, client: SglangClient, version: int, *, flush: bool) -> None:
        self._groups = {known: group for known, group in self._groups.items() if not known.closed}
        if (group := self._groups.get(client)) is None:
            group = self._groups[client] = await self._form(client)
        try:
            await self._begin(client)
            buckets = list(_buckets(self._stage.shapes))
            for number, names in enumerate(buckets, 1):
                last = number == len(buckets)
                await self._send(client, group, names, version, flush=flush and last)
            await client.end_update()
        except BaseException:
            del self._groups[client]  # nobody knows how far it is
            raise

    async def _form(self, client: SglangClient) -> _Group:
        name = f"millrace-{next(_numbers)}"
        store = dist.TCPStore(
            "127.0.0.1", 0, self._num_ranks + 1, True, timedelta(seconds=GROUP_TIMEOUT_S), wait_for_workers=False
        )
        joined = client.join_group(name, store.port, self._num_ranks + 1, GROUP_TIMEOUT_S)
        backend = await _together(joined, asyncio.to_thread(self._backend, name, store))
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

    async def _begin(self, client: SglangClient) -> None:
        try:
            await client.begin_update()
        except Refused:  # one that was broken off is still open
            await client.end_update()
            await client.begin_update()

    async def _send(
        self, client: SglangClient, group: _Group, names: Sequence[str], version: int, *, flush: bool
    ) -> None:
        shapes = self._stage.shapes
        rows = [TensorRow(name=name, dtype=shapes[name].dtype, shape=shapes[name].shape) for name in names]
        received = client.update_from_group(group.name, rows, version, flush=flush)
        await _together(received, asyncio.to_thread(self._broadcast, group, names))

    def _broadcast(self, group: _Group, names: Sequence[str]) -> None:
        shapes = self._stage.shapes
        try:
            for name in names:
                tensor = torch.from_numpy(shapes[name].bits.view("i1"))
                group.backend.broadcast(tensor, 0).wait()
        except RuntimeError as error:  # gloo's word for a peer that is gone or late
            raise InfrastructureError(f"the group {group.name} broke: {error}") from error


async def _together(server: Coroutine[Any, Any, None], here: Coroutine[Any, Any, T]) -> T:
    """Both halves; what this one returned. When it fails, the server is not waited for: it would wait for this one."""
    asked = asyncio.ensure_future(server)
    try:
        done = await here
    except BaseException:
        asked.cancel()
        told = (await asyncio.gather(asked, return_exceptions=True))[0]
        if isinstance(told, Exception):
            raise told from None  # what the server complained of says more
        raise
    await asked
    return done


def _buckets(shapes: Mapping[str, Any]) -> Iterator[list[str]]:
    """Names in order, so that no bucket is larger than it may be, unless one tensor is."""
    bucket: list[str] = []
    size = 0
    for name, tensor in shapes.items():
        if bucket and size + tensor.bits.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(name)
        size += tensor.bits.nbytes
    if bucket:
        yield bucket
