"""Weights over real gRPC, with everything that can go wrong: the replica keeps its old version, says why, recovers."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Awaitable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.common.config.policy import WeightsConfig
from services.common.errors import BaseUnavailableError, CorruptDataError, VersionConflictError, VersionUnavailableError
from services.common.pb import weights_pb2, weights_pb2_grpc
from services.common.rpc.server import Server
from services.common.transfer.servicer import WeightServicer
from services.common.transfer.source import PayloadRequest
from services.common.types import WeightVersion
from services.common.weights import snapshot_file
from services.common.weights.manifest import BaseVersion, Encoding, Manifest, TensorSpec
from services.common.weights.snapshot_file import SnapshotSpaceError, SnapshotWriter
from services.inference.engine.weight_update import WeightUpdate
from services.inference.weights.fetch import Fetched, fetch
from services.inference.weights.fetcher import SourceFetcher
from services.inference.weights.mirror import Mirror
from services.inference.weights.updater import WeightUpdater
from services.trainer.publisher_process import PublisherProcess
from services.trainer.publisher_store import PublisherStore

RUN, POLICY = "run-1", "model0"
SIZE = 700_000  # more than one chunk on the wire


def write_version(directory: Path, number: int, run: str = RUN, seed: int = 0) -> tuple[Path, Manifest]:
    """Version n differs from version n - 1 in a few elements."""
    rng = np.random.default_rng(seed)
    weights = rng.integers(0, 1 << 16, size=SIZE, dtype=np.uint16)
    for step in range(1, number + 1):
        weights[step::5000] += np.uint16(step)
    specs = [TensorSpec(name="w", dtype="bfloat16", shape=(SIZE,)), TensorSpec(name="b", dtype="bfloat16", shape=(3,))]
    with SnapshotWriter.create(
        run_id=run, policy=POLICY, version=number, specs=specs, directories=(directory,)
    ) as writer:
        for entry in writer.tensors:
            bits = writer.bits(entry)
            bits[:] = weights if entry.name == "w" else 1
            del bits
        return writer.path, writer.seal()


def announced(manifest: Manifest, *sources: str) -> WeightVersion:
    return WeightVersion(policy=POLICY, number=manifest.version, digest=manifest.digest, sources=sources)


def by_grpc(version: WeightVersion, base: BaseVersion | None, source: str) -> Awaitable[Fetched]:
    return fetch(source, RUN, version, base, transports=["grpc"])


class RecordingEngine:
    """Remembers which versions it was told of."""

    def __init__(self) -> None:
        self.versions: list[int] = []

    async def update(self, update: WeightUpdate) -> float:
        self.versions.append(update.version)
        return 0.0


class FaultyServicer(WeightServicer):
    """The real servicer, with a fault to inject into the next stream."""

    def __init__(self, store: PublisherStore) -> None:
        super().__init__({POLICY: store})
        self.fault = ""
        self.offsets: list[int] = []
        self.hold = asyncio.Event()
        self.hold.set()

    async def FetchWeights(self, request: Any, context: Any) -> AsyncIterator[weights_pb2.FetchWeightsResponse]:
        self.offsets.append(request.start_offset)
        fault, self.fault = self.fault, ""
        number = 0
        async for chunk in super().FetchWeights(request, context):
            number += 1
            if fault == "corrupt":
                yield weights_pb2.FetchWeightsResponse(offset=chunk.offset, data=bytes(len(chunk.data)))
                continue
            yield chunk
            if fault == "break" and number == 1:
                raise ConnectionResetError("the test broke the stream")
            if fault == "unavailable" and number == 1:
                from services.common.errors import InfrastructureError

                raise InfrastructureError("the test broke the stream")
            if fault == "truncate":
                return
            await self.hold.wait()


class World:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.store = PublisherStore(RUN, POLICY, WeightsConfig())
        self.servicer = FaultyServicer(self.store)
        self.server = Server(service="publisher", instance_id="p", host="127.0.0.1", port=0)
        self.server.add(
            weights_pb2_grpc.add_WeightServiceServicer_to_server, self.servicer, "millrace.v1.WeightService"
        )
        self.engine = RecordingEngine()
        self.mirror = Mirror(POLICY)
        fetcher = SourceFetcher(lambda: RUN, ["grpc"])
        self.updater = WeightUpdater(self.mirror, self.engine, fetcher, Mirror.host_arrays)  # type: ignore[arg-type]

    def publish(self, number: int) -> WeightVersion:
        path, manifest = write_version(self.directory, number)
        self.store.add(path)
        return announced(manifest, self.server.address)

    async def until_held(self, version: WeightVersion) -> None:
        async with asyncio.timeout(20):
            while self.updater.held().digest != version.digest:
                await asyncio.sleep(0.01)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path)
    await made.server.start()
    task = asyncio.create_task(made.updater.run())
    yield made
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await made.server.stop(grace_s=0.1)
    made.store.close()


async def test_the_first_version_comes_in_full_and_the_next_as_a_small_delta(world: World) -> None:
    for number in (1, 2):
        version = world.publish(number)
        world.updater.offer(version)
        await world.until_held(version)
        assert world.updater.last is not None
        assert world.updater.last.encoding == ("full" if number == 1 else "delta")
    assert world.updater.last.payload_size_bytes < SIZE * 2 / 100
    assert world.engine.versions == [1, 2]
    assert world.mirror.manifest is not None
    assert world.mirror.manifest.digest == version.digest


async def test_a_corrupt_chunk_changes_nothing_and_the_next_attempt_is_right(world: World) -> None:
    first = world.publish(1)
    world.updater.offer(first)
    await world.until_held(first)
    world.servicer.fault = "corrupt"
    second = world.publish(2)
    world.updater.offer(second)
    await world.until_held(second)
    assert world.updater.num_failures == 1
    assert world.engine.versions == [1, 2]


async def test_a_broken_stream_is_resumed_at_its_offset(world: World) -> None:
    version = world.publish(1)
    world.servicer.fault = "unavailable"
    world.updater.offer(version)
    await world.until_held(version)
    assert world.servicer.offsets == [0, 1 << 20]
    assert world.updater.num_failures == 0


async def test_a_truncated_stream_is_no_version(world: World) -> None:
    version = world.publish(1)
    world.servicer.fault = "truncate"
    world.updater.offer(version)
    await world.until_held(version)
    assert world.updater.num_failures == 1


async def test_a_wrong_base_is_answered_with_the_whole(world: World) -> None:
    version = world.publish(2)
    wrong = BaseVersion(number=1, digest="xxh3-128:" + "0" * 32)
    with pytest.raises(BaseUnavailableError):
        world.store.payload(PayloadRequest(run_id=RUN, policy=POLICY, version=2, base=wrong))
    assert (await by_grpc(version, wrong, world.server.address)).payload.encoding is Encoding.FULL


async def test_unknown_versions_other_runs_and_other_digests_are_refused(world: World) -> None:
    version = world.publish(1)
    with pytest.raises(VersionUnavailableError):
        await fetch(world.server.address, RUN, replace(version, number=9), None)
    with pytest.raises(VersionUnavailableError):
        await fetch(world.server.address, "another-run", version, None)
    with pytest.raises(CorruptDataError, match="the ledger says"):
        await fetch(world.server.address, RUN, replace(version, digest="xxh3-128:" + "1" * 32), None)
    path, _ = write_version(world.directory / "..", 1, seed=5)
    with pytest.raises(VersionConflictError):
        world.store.add(path)
    path.unlink()


async def test_a_slow_reader_keeps_its_version_while_two_more_are_published(world: World) -> None:
    first = world.publish(1)
    world.servicer.hold.clear()  # after the first chunk
    reading = asyncio.ensure_future(by_grpc(first, None, world.server.address))
    async with asyncio.timeout(10):
        while not world.servicer.offsets:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    world.publish(2)
    world.publish(3)
    world.servicer.hold.set()
    fetched = await reading
    verified = Mirror(POLICY).verify(fetched.payload, fetched.data)
    assert verified.manifest.digest == first.digest
    assert not list(world.directory.glob("*.1.*")), "removed after its last reader"


async def test_an_interrupted_write_leaves_the_mirror_dirty_and_the_next_fetch_is_full(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = world.publish(1)
    world.updater.offer(first)
    await world.until_held(first)
    second = world.publish(2)
    fetched = await by_grpc(second, world.mirror.base, world.server.address)
    assert fetched.payload.encoding is Encoding.DELTA
    verified = world.mirror.verify(fetched.payload, fetched.data)

    class Interrupted(dict):  # type: ignore[type-arg]
        def items(self) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        world.mirror.write(replace(verified, changes=Interrupted(verified.changes)))
    assert world.mirror.base is None
    world.updater.offer(second)
    await world.until_held(second)
    assert world.updater.last is not None
    assert world.updater.last.encoding == "full"


async def test_a_publisher_killed_in_mid_run_is_replaced_on_the_same_address(tmp_path: Path) -> None:
    publisher = PublisherProcess(run_id=RUN, policy=POLICY, config=WeightsConfig(port=0))
    publisher.start()
    engine, mirror = RecordingEngine(), Mirror(POLICY)
    updater = WeightUpdater(mirror, engine, SourceFetcher(lambda: RUN), Mirror.host_arrays)  # type: ignore[arg-type]
    task = asyncio.create_task(updater.run())

    async def held(version: WeightVersion) -> None:
        async with asyncio.timeout(30):
            while updater.held().digest != version.digest:
                await asyncio.sleep(0.02)

    try:
        path, manifest = write_version(tmp_path, 1)
        publisher.announce(path)
        address = publisher.address
        updater.offer(announced(manifest, address))
        await held(announced(manifest))
        assert publisher._process is not None
        os.kill(publisher._process.pid, 9)
        publisher._process.wait(10)
        second_path, second = write_version(tmp_path, 2)
        updater.offer(announced(second, address))
        async with asyncio.timeout(20):
            while not updater.num_failures:
                await asyncio.sleep(0.02)
        assert updater.held().number == 1, "it keeps serving the old version"
        await asyncio.to_thread(publisher.announce, second_path)
        assert publisher.address == address
        await held(announced(second))
        assert engine.versions == [1, 2]
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        publisher.stop()


def test_full_shared_memory_falls_back_to_the_next_directory_and_then_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, roomy = tmp_path / "full", tmp_path / "roomy"
    full.mkdir()
    roomy.mkdir()
    reserve = os.posix_fallocate

    def no_room_in_the_first(descriptor: int, offset: int, size: int) -> None:
        if str(full) in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(descriptor, offset, size)

    monkeypatch.setattr(snapshot_file.os, "posix_fallocate", no_room_in_the_first)
    specs = [TensorSpec(name="w", dtype="float32", shape=(8,))]
    with SnapshotWriter.create(run_id=RUN, policy=POLICY, version=1, specs=specs, directories=(full, roomy)) as writer:
        assert writer.path.parent == roomy
        writer.seal()
    with pytest.raises(SnapshotSpaceError, match=r"no room for version 2.*Free memory there"):
        SnapshotWriter.create(run_id=RUN, policy=POLICY, version=2, specs=specs, directories=(full,))
    assert not list(full.iterdir()), "nothing half-written is left"
