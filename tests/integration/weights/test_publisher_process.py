"""The publisher as a process: service to many receivers at once, and service after a kill."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.common.config.training import WeightsConfig
from services.common.errors import InfrastructureError, VersionUnavailableError
from services.common.records import WeightVersion
from services.common.weights.snapshot import BaseVersion, Encoding, Manifest
from services.inference.weights.updater import Fetched
from services.trainer import publish
from services.trainer.publish import PublisherProcess
from services.trainer.publisher import PublisherSettings
from tests.integration.weights.test_transfer_faults import POLICY, RUN, announced, write_version
from tests.integration.weights.transfer_world import fetched
from tests.running import is_running
from tests.waiting import WAIT_S, wait_until

Start = Callable[..., PublisherProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[PublisherProcess] = []

    def make(**config: object) -> PublisherProcess:
        weights = WeightsConfig(port=0, transfer="delta", **config)  # type: ignore[arg-type]
        settings = PublisherSettings(run_id=RUN, policy=POLICY, weights=weights, run_dir=tmp_path / "run")
        started.append(PublisherProcess(settings))
        started[-1].start()
        return started[-1]

    yield make
    for publisher in started:
        publisher.stop()


def kill(publisher: PublisherProcess) -> None:
    pid = publisher.pid
    assert pid is not None
    os.kill(pid, 9)
    wait_until(lambda: not is_running(pid), "it has ended")


async def taken(publisher: PublisherProcess, manifest: Manifest, base: Manifest | None = None) -> Fetched:
    """Fetch the payload as a receiver with ``base``."""
    held = BaseVersion(number=base.version, digest=base.digest) if base is not None else None
    version: WeightVersion = announced(manifest, publisher.address)
    return await fetched(publisher.address, version, held, ["grpc"], RUN)


async def test_after_a_kill_it_serves_the_snapshots_still_there_and_deltas_between_them(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "LOOK_S", 60.0)  # it is found dead by the next announcement
    publisher = start()
    (tmp_path / "garbage").write_bytes(b"no snapshot at all, but long enough for a header")
    with pytest.raises(InfrastructureError, match="garbage: not a snapshot"):
        publisher.announce(tmp_path / "garbage")
    manifests = []
    for number in (1, 2):
        path, manifest = write_version(tmp_path, number)
        manifests.append(manifest)
        await asyncio.to_thread(publisher.announce, path)
    before = await taken(publisher, manifests[1], base=manifests[0])
    address = publisher.address
    kill(publisher)
    path, newest = write_version(tmp_path, 3)
    await asyncio.to_thread(publisher.announce, path)
    assert publisher.address == address
    assert (await taken(publisher, newest, base=manifests[1])).payload.encoding is Encoding.DELTA
    assert (await taken(publisher, newest, base=manifests[0])).payload.encoding is Encoding.FULL, (
        "its base is forgotten"
    )
    assert before.payload.encoding is Encoding.DELTA
    publisher.stop()
    assert not list(tmp_path.glob("rollmill.*")), "also what the one that was killed would have removed"


async def test_one_that_is_killed_serves_again_without_another_announcement(start: Start, tmp_path: Path) -> None:
    publisher = start()
    path, manifest = write_version(tmp_path, 1)
    await asyncio.to_thread(publisher.announce, path)
    address = publisher.address
    kill(publisher)
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                fetched = await taken(publisher, manifest)
                break
            except (InfrastructureError, VersionUnavailableError):  # not there, or not told yet
                await asyncio.sleep(0.1)
    assert fetched.payload.target.digest == manifest.digest and publisher.address == address


async def test_a_publisher_that_always_dies_becomes_an_error(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "LOOK_S", 60.0)
    publisher = start()
    monkeypatch.setattr(publish, "RESTART_TIMEOUT_S", 0.2)
    monkeypatch.setattr(publish, "START_TIMEOUT_S", 0.01)  # what does not answer in time is killed
    kill(publisher)
    path, _ = write_version(tmp_path, 1)
    with pytest.raises(InfrastructureError, match=r"no weight publisher accepted .* within 0.2 s"):
        await asyncio.to_thread(publisher.announce, path)
