"""A publisher that takes longer to code a delta than a call may take: the replica waits for the delta, and fails nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from services.common.config.training import WeightsConfig
from services.common.transfer.servicer import WeightServicer
from services.common.weights.snapshot import Encoding, Payload, PayloadNotReadyError, PayloadRequest
from services.inference.weights.mirror import Mirror
from services.trainer import publisher
from services.trainer.publisher import Delta, PublisherStore
from tests.integration.weights.test_transfer_faults import (
    POLICY,
    RUN,
    RecordingEngine,
    announced,
    updater,
    write_version,
)
from tests.integration.weights.transfer_world import serving
from tests.waiting import WAIT_S, until


class Gate:
    """Lets deltas be coded only when the test says so."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self._encode = publisher.encode_delta

    def encode(self, *arguments: Any) -> Delta | None:
        assert self.go.wait(WAIT_S)
        return self._encode(*arguments)


class CountingStore(PublisherStore):
    """Counts answers of each kind."""

    num_not_ready = 0
    num_full = 0

    def payload(self, request: PayloadRequest) -> Payload:
        try:
            payload = super().payload(request)
        except PayloadNotReadyError:
            self.num_not_ready += 1
            raise
        self.num_full += payload.encoding is Encoding.FULL
        return payload


class World:
    """A slow publisher and a replica."""

    def __init__(self, directory: Path, gate: Gate) -> None:
        self.directory = directory
        self.gate = gate
        self.store = CountingStore(RUN, POLICY, WeightsConfig(transfer="delta"))
        self.server = serving(WeightServicer({POLICY: self.store}))
        self.updater = updater(Mirror(POLICY), RecordingEngine(), "grpc")

    def publish(self, number: int) -> None:
        path, manifest = write_version(self.directory, number)
        self.store.add(path)
        self.updater.offer(announced(manifest, self.server.address))

    async def until_held(self, number: int) -> None:
        await until(lambda: self.updater.held().number == number)


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr("services.inference.weights.fetch.PayloadRequest", partial(PayloadRequest, wait_s=0.02))
    gate = Gate()
    monkeypatch.setattr(publisher, "encode_delta", gate.encode)
    made = World(tmp_path, gate)
    await made.server.start()
    task = asyncio.create_task(made.updater.run())
    yield made
    made.gate.go.set()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await made.server.stop(grace_s=0.1)
    made.store.close()


async def test_a_replica_waits_for_a_slow_delta_and_keeps_nothing_old_for_a_failure(world: World) -> None:
    world.publish(1)
    await world.until_held(1)
    world.publish(2)
    await until(lambda: world.store.num_not_ready >= 3)
    assert world.updater.held().number == 1
    world.gate.go.set()
    await world.until_held(2)
    first, second = world.updater.take_transfers()
    assert (first.encoding, second.encoding) == ("full", "delta")
    assert world.updater.num_failures == 0, "kept_old"
    assert world.store.num_full == 1, "only the first version"


async def test_a_replica_goes_on_with_the_newest_version_while_the_publisher_lags(world: World) -> None:
    world.publish(1)
    await world.until_held(1)
    world.publish(2)
    await until(lambda: world.store.num_not_ready)
    for number in (3, 4, 5):
        world.publish(number)
    world.gate.go.set()
    await world.until_held(5)
    assert world.updater.num_failures == 0
    taken = [(transfer.version, transfer.encoding) for transfer in world.updater.take_transfers()]
    assert taken == [(1, "full"), (2, "delta"), (5, "delta")]
