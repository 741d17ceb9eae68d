"""A replica killed during the write of a version damages neither the publisher's files nor its successor."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from services.common.config.training import WeightsConfig
from services.common.records import WeightVersion
from services.common.transfer.servicer import WeightServicer
from services.trainer.publisher import PublisherStore
from tests.integration.weights.killable_replica import replica
from tests.integration.weights.test_transfer_faults import POLICY, RUN, announced, write_version
from tests.integration.weights.transfer_world import serving
from tests.waiting import WAIT_S


@contextmanager
def started(way: str, stand_still_at: int = -1) -> Iterator[tuple[BaseProcess, Connection]]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=replica, args=(theirs, way, stand_still_at), daemon=True)
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join(WAIT_S)
        ours.close()


async def answer(pipe: Connection) -> object:
    assert await asyncio.to_thread(pipe.poll, WAIT_S), "the replica says nothing"
    received: object = pipe.recv()
    return received


class Publisher:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.store = PublisherStore(RUN, POLICY, WeightsConfig(transfer="delta"))
        self.server = serving(WeightServicer({POLICY: self.store}))

    def publish(self, number: int) -> tuple[WeightVersion, dict[str, str], Path]:
        """The version, the digests of its tensors, and its file."""
        path, manifest = write_version(self.directory, number)
        self.store.add(path)
        return announced(manifest, self.server.address), {entry.name: entry.digest for entry in manifest.tensors}, path


@pytest.fixture
async def publisher(tmp_path: Path) -> AsyncIterator[Publisher]:
    made = Publisher(tmp_path)
    await made.server.start()
    yield made
    await made.server.stop(grace_s=0.1)
    made.store.close()


@pytest.mark.parametrize("way", ["grpc", "mapped"])
async def test_a_replica_killed_in_mid_write_is_replaced_by_one_that_is_right(publisher: Publisher, way: str) -> None:
    first, first_digests, first_file = publisher.publish(1)
    before = first_file.read_bytes()
    with started(way, stand_still_at=2) as (process, pipe):
        pipe.send(first)
        assert await answer(pipe) == first_digests
        second, second_digests, _ = publisher.publish(2)
        pipe.send(second)
        assert await answer(pipe) == "half"
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join(WAIT_S)
        assert process.exitcode == -signal.SIGKILL
    assert first_file.read_bytes() == before, "what was mapped is the publisher's alone"
    with started(way) as (_, pipe):
        pipe.send(second)
        assert await answer(pipe) == second_digests
        third, third_digests, _ = publisher.publish(3)
        pipe.send(third)
        assert await answer(pipe) == third_digests
