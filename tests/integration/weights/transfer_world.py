"""A weight service over payloads in memory, for tests of the ways in which bytes travel."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from services.common.errors import NotFoundError, VersionUnavailableError
from services.common.pb import weights_pb2_grpc
from services.common.records import WeightVersion
from services.common.rpc.server import Server
from services.common.security import identity
from services.common.transfer.bulk import BulkServer, MemoryReader, PayloadReader, SendBudget
from services.common.transfer.servicer import WeightServicer
from services.common.weights.snapshot import (
    BaseVersion,
    Encoding,
    Manifest,
    Payload,
    PayloadRequest,
    TensorSpec,
    lay_out,
    tensor_digest,
)
from services.inference.weights.fetch import TRANSPORTS
from services.inference.weights.updater import Fetched, SourceFetcher

RUN, POLICY = "run-1", "model0"


class MemorySource:
    """One version, in full. Counts its leases; ``delay_s`` slows every read; ``fail_at`` breaks reads from there on."""

    def __init__(self, num_bytes: int, file: Path | None = None, seed: int = 0) -> None:
        self.data = np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)
        [entry] = lay_out([TensorSpec(name="w", dtype="uint8", shape=(num_bytes,))])
        self.manifest = Manifest.of(
            run_id=RUN, policy=POLICY, version=1, tensors=[replace(entry, digest=tensor_digest(self.data))]
        )
        self.num_leases = 0
        self.delay_s = 0.0
        self.fail_at: int | None = None
        self.piece_bytes = num_bytes
        self.gone = False
        self.file = file
        if file is not None:
            file.write_bytes(bytes(100) + self.data.tobytes())

    @property
    def version(self) -> WeightVersion:
        return WeightVersion(policy=POLICY, number=1, digest=self.manifest.digest)

    def payload(self, request: PayloadRequest) -> Payload:
        if request.run_id != RUN or request.version != 1:
            raise VersionUnavailableError("not held")
        return Payload(
            payload_id=f"{POLICY}:1:full:{self.manifest.digest}",
            encoding=Encoding.FULL,
            size_bytes=len(self.data),
            target=self.manifest,
            file=(self.file, 100) if self.file else None,
        )

    def open(self, payload_id: str) -> PayloadReader:
        if self.gone or payload_id != f"{POLICY}:1:full:{self.manifest.digest}":
            raise NotFoundError(f"{payload_id} is gone")
        self.num_leases += 1
        return _Reader(self)

    def released(self) -> None:
        self.num_leases -= 1


class _Reader(MemoryReader):
    def __init__(self, source: MemorySource) -> None:
        super().__init__(source.data.data, source.released)
        self._source = source

    async def read(self, offset: int, size: int) -> memoryview:
        if self._source.delay_s:
            await asyncio.sleep(self._source.delay_s)
        if self._source.fail_at is not None and offset + size > self._source.fail_at:
            if offset >= self._source.fail_at:
                raise NotFoundError("the test took it away")
            size = self._source.fail_at - offset
        return await super().read(offset, min(size, self._source.piece_bytes))


def serving(servicer: WeightServicer) -> Server:
    """A server of weights that is not started."""
    server = Server(service="publisher", instance_id="p", host="127.0.0.1", port=0)
    server.add(weights_pb2_grpc.add_WeightServiceServicer_to_server, servicer, "rollmill.v1.WeightService")
    return server


class Sender:
    """A server with its parts within reach."""

    def __init__(self, source: MemorySource, bytes_per_s: float = 0.0, idle_s: float = 60.0) -> None:
        self.source = source
        self.budget = SendBudget(bytes_per_s)
        encrypted = identity.current() is not None
        self.bulk = BulkServer(self.budget, encrypted=encrypted, from_bytes=0, idle_s=idle_s)
        self.server = serving(WeightServicer({POLICY: source}, self.budget, self.bulk))

    @property
    def address(self) -> str:
        return self.server.address


async def fetched(
    address: str,
    version: WeightVersion,
    base: BaseVersion | None = None,
    transports: Sequence[str] = TRANSPORTS,
    run: str = RUN,
) -> Fetched:
    """The payload of a version from one source, as a replica fetches it."""
    return await SourceFetcher(run, transports).fetch(replace(version, sources=(address,)), base, None)


@asynccontextmanager
async def sending(source: MemorySource, bytes_per_s: float = 0.0, idle_s: float = 60.0) -> AsyncIterator[Sender]:
    """A sender that is up until the block ends."""
    sender = Sender(source, bytes_per_s, idle_s)
    await sender.bulk.start()
    await sender.server.start()
    try:
        yield sender
    finally:
        await sender.bulk.stop()
        await sender.server.stop(grace_s=0.1)
