"""Weights over real gRPC, with everything that can go wrong: the replica keeps its old version, says why, recovers."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from services.common.config.training import WeightsConfig
from services.common.errors import (
    CorruptDataError,
    DeadlineError,
    InfrastructureError,
    VersionConflictError,
    VersionUnavailableError,
)
from services.common.records import WeightTransfer, WeightVersion
from services.common.transfer.bulk import BulkServer, PayloadReader, SendBudget
from services.common.transfer.servicer import WeightServicer
from services.common.weights.snapshot import (
    BaseVersion,
    Manifest,
    Payload,
    PayloadNotReadyError,
    PayloadRequest,
    SnapshotWriter,
    TensorSpec,
)
from services.inference.engine.base import WeightUpdate
from services.inference.weights import updater as updater_module
from services.inference.weights.mirror import Mirror
from services.inference.weights.updater import Fetched, SourceFetcher, WeightUpdater
from services.trainer.publish import PublisherProcess
from services.trainer.publisher import PublisherSettings, PublisherStore
from tests.integration.weights.transfer_world import fetched, serving
from tests.running import is_running
from tests.waiting import until

RUN, POLICY = "run-1", "model0"
SIZE = 700_000  # more than one chunk on the wire


def write_version(directory: Path, number: int, run: str = RUN, seed: int = 0) -> tuple[Path, Manifest]:
    """Version n differs from version n - 1 in a few elements."""
    rng = np.random.default_rng(seed)
    weights = rng.integers(0, 1 << 16, size=SIZE, dtype=np.uint16)
    for step in range(1, number + 1):
        weights[step::5000] += np.uint16(step)
    specs = [TensorSpec(name="w", dtype="bfloat16", shape=(SIZE,)), TensorSpec(name="b", dtype="bfloat16", shape=(3,))]
    writer = SnapshotWriter.create(run_id=run, policy=POLICY, version=number, specs=specs, directories=(directory,))
    for entry in writer.tensors:
        bits = writer.bits(entry)
        bits[:] = weights if entry.name == "w" else 1
        del bits
    return writer.path, writer.seal()


def announced(manifest: Manifest, *sources: str) -> WeightVersion:
    return WeightVersion(policy=POLICY, number=manifest.version, digest=manifest.digest, sources=sources)


class RecordingEngine:
    """Records the announced versions."""

    def __init__(self) -> None:
        self.versions: list[int] = []

    async def update(self, update: WeightUpdate) -> float:
        self.versions.append(update.version)
        return 0.0


class FaultySource:
    """A publisher's store, with a fault to inject into the next bytes that are read, or into the file offered."""

    def __init__(self, store: PublisherStore) -> None:
        self._store = store
        self.fault = ""
        self.away = 0  # so many more questions are answered with an error
        self.not_ready = 0  # so many more are asked again later
        self.offsets: list[int] = []
        self.hold = asyncio.Event()
        self.hold.set()

    def payload(self, request: PayloadRequest) -> Payload:
        if self.away:
            self.away -= 1
            raise DeadlineError("the test made it slow")
        if self.not_ready:
            self.not_ready -= 1
            raise PayloadNotReadyError("the test is slow", started=True, size_bytes=1)
        payload = self._store.payload(request)
        return replace(payload, file=self._faulty(*payload.file)) if request.can_map and payload.file else payload

    def open(self, payload_id: str) -> PayloadReader:
        return FaultyReader(self._store.open(payload_id), self)

    def _faulty(self, path: Path, offset: int) -> tuple[Path, int]:
        fault, self.fault = self.fault, ""
        if not fault:
            return path, offset
        if fault == "break":
            return path.with_suffix(".gone"), offset
        damaged = path.with_suffix(".damaged")
        data = path.read_bytes()
        damaged.write_bytes(data[:offset].ljust(len(data), b"x"))
        return damaged, offset


class FaultyReader(PayloadReader):
    """``corrupt``: other bytes. ``break``: an error after the first chunk."""

    def __init__(self, reader: PayloadReader, source: FaultySource) -> None:
        super().__init__(reader.size_bytes, reader.close)
        self._reader = reader
        self._source = source

    async def read(self, offset: int, size: int) -> memoryview:
        self._source.offsets.append(offset)
        data = await self._reader.read(offset, size)
        if self._source.fault == "corrupt":
            self._source.fault = ""
            return memoryview(bytes(len(data)))
        if self._source.fault == "break" and offset:
            self._source.fault = ""
            raise InfrastructureError("the test broke the stream")
        if offset:
            await self._source.hold.wait()
        return data


class World:
    """A publisher's side and a replica's, in one process. The replica uses one transport, and gRPC if that fails."""

    def __init__(self, directory: Path, way: str) -> None:
        self.way = way
        self.directory = directory
        self.store = PublisherStore(RUN, POLICY, WeightsConfig(transfer="delta"))
        self.source = FaultySource(self.store)
        self.bulk = BulkServer(SendBudget(), from_bytes=0)
        self.server = serving(WeightServicer({POLICY: self.source}, bulk=self.bulk))
        self.engine = RecordingEngine()
        self.mirror = Mirror(POLICY)
        self.updater = updater(self.mirror, self.engine, way)

    def publish(self, number: int) -> WeightVersion:
        path, manifest = write_version(self.directory, number)
        self.store.add(path)
        return announced(manifest, self.server.address)

    async def fetch(self, version: WeightVersion, base: BaseVersion | None = None, run: str = RUN) -> Fetched:
        return await fetched(self.server.address, version, base, [self.way], run)

    async def take(self, version: WeightVersion) -> WeightTransfer:
        """Offer a version, wait until the engine has the version, and return the record."""
        self.updater.offer(version)
        await until(lambda: self.updater.held().digest == version.digest)
        assert self.updater.last is not None
        return self.updater.last


def updater(mirror: Mirror, engine: RecordingEngine, way: str) -> WeightUpdater:
    fetcher = SourceFetcher(RUN, [way])
    return WeightUpdater(mirror, engine, fetcher, Mirror.host_arrays)  # type: ignore[arg-type]


@pytest.fixture(params=["grpc", "bulk", "mapped"])
async def world(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[World]:
    made = World(tmp_path, request.param)
    await made.bulk.start()
    await made.server.start()
    task = asyncio.create_task(made.updater.run())
    yield made
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await made.bulk.stop()
    await made.server.stop(grace_s=0.1)
    made.store.close()


@pytest.mark.parametrize("number", [1, 2])
async def test_a_corrupt_chunk_changes_nothing_and_the_next_attempt_is_right(world: World, number: int) -> None:
    await world.take(world.publish(1)) if number == 2 else None
    held = world.mirror.base
    version = world.publish(number)
    world.source.fault = "corrupt"
    world.updater.offer(version)
    await until(lambda: world.updater.num_failures)
    assert world.mirror.base == held
    failed = world.updater.take_transfers()[-1]
    assert failed.error.startswith("DIGEST_MISMATCH")
    await world.take(version)
    assert world.updater.num_failures == 1
    assert world.engine.versions == list(range(1, number + 1))


async def test_a_broken_stream_is_resumed_at_its_offset(world: World) -> None:
    version = world.publish(1)
    world.source.fault = "break"
    await world.take(version)
    assert not world.source.fault, "it happened"
    assert world.source.offsets == sorted(world.source.offsets)
    assert world.updater.num_failures == 0


async def test_a_source_that_is_away_for_a_moment_costs_no_full_transfer(world: World) -> None:
    await world.take(world.publish(1))
    second = world.publish(2)
    world.source.away = 2
    assert (await world.take(second)).encoding == "delta"
    assert world.updater.num_failures == 2


async def test_a_delta_that_takes_long_to_code_is_waited_for_and_is_no_failure(world: World) -> None:
    await world.take(world.publish(1))
    second = world.publish(2)
    world.source.not_ready = 3
    assert (await world.take(second)).encoding == "delta"
    assert (world.source.not_ready, world.updater.num_failures) == (0, 0)


async def test_a_delta_that_never_comes_is_given_up_for_the_snapshot(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(updater_module, "_MAX_DELTA_FAILURES", 2)
    await world.take(world.publish(1))
    second = world.publish(2)
    world.source.away = 2
    assert (await world.take(second)).encoding == "full"


async def test_unknown_versions_other_runs_and_other_digests_are_refused(world: World) -> None:
    version = world.publish(1)
    with pytest.raises(VersionUnavailableError):
        await world.fetch(replace(version, number=9))
    with pytest.raises(VersionUnavailableError):
        await world.fetch(version, run="another-run")
    with pytest.raises(CorruptDataError, match="the ledger says"):
        await world.fetch(replace(version, digest="xxh3-128:" + "1" * 32))
    path, _ = write_version(world.directory / "..", 1, seed=5)
    with pytest.raises(VersionConflictError):
        world.store.add(path)
    path.unlink()


async def test_a_slow_reader_keeps_its_version_while_two_more_are_published(world: World) -> None:
    first = world.publish(1)
    world.source.hold.clear()  # after the first chunk
    reading = asyncio.create_task(world.fetch(first))
    await until(lambda: world.source.offsets or reading.done())
    await asyncio.sleep(0.1)
    world.publish(2)
    world.publish(3)
    world.source.hold.set()
    fetched = await reading
    assert fetched.transport == world.way
    verified = Mirror(POLICY).verify(fetched.payload, fetched.data)
    assert verified.manifest.digest == first.digest
    await until(lambda: not list(world.directory.glob("*.1.*")))  # removed after its last reader


async def test_a_delta_on_a_mapped_version_gives_back_its_file(tmp_path: Path) -> None:
    world = World(tmp_path, "mapped")
    await world.server.start()
    task = asyncio.create_task(world.updater.run())
    try:
        await world.take(world.publish(1))
        assert _num_mappings(tmp_path, 1) > 1, "the publisher's and the mirror's"
        second = world.publish(2)
        await world.take(second)
        assert _num_mappings(tmp_path, 1) == 1, "the publisher's alone"
        assert world.mirror.base == BaseVersion(number=2, digest=second.digest)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await world.server.stop(grace_s=0.1)
        world.store.close()


def _num_mappings(directory: Path, version: int) -> int:
    gc.collect()
    [name] = [path.name for path in directory.glob(f"*.{version}.*")]
    return sum(name in line for line in Path("/proc/self/maps").read_text().splitlines())


async def test_a_publisher_killed_in_mid_transfer_is_replaced_on_the_same_address(tmp_path: Path) -> None:
    slow = WeightsConfig(port=0, transfer="full", send_bytes_per_s=3_000_000)  # a version takes half a second
    publisher = PublisherProcess(PublisherSettings(run_id=RUN, policy=POLICY, weights=slow))
    publisher.start()
    engine, mirror = RecordingEngine(), Mirror(POLICY)
    replica = updater(mirror, engine, "grpc")
    task = asyncio.create_task(replica.run())
    try:
        path, first = write_version(tmp_path, 1)
        publisher.announce(path)
        address = publisher.address
        replica.offer(announced(first, address))
        await until(lambda: replica.held().digest == first.digest)
        path, second = write_version(tmp_path, 2)
        await asyncio.to_thread(publisher.announce, path)
        pid = publisher.pid
        assert pid is not None
        replica.offer(announced(second, address))
        await asyncio.sleep(0.1)
        assert replica.held().number == 1
        os.kill(pid, 9)
        await until(lambda: not is_running(pid), "the publisher has ended")
        await until(lambda: replica.num_failures)
        assert replica.held().number == 1, "the replica keeps serving the old version"
        await asyncio.to_thread(publisher.announce, path)
        assert publisher.address == address
        await until(lambda: replica.held().digest == second.digest)
        assert engine.versions == [1, 2]
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        publisher.stop()
