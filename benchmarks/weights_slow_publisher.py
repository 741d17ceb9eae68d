"""A publisher of deltas that take 30 s: the versions that a replica gets, and the attempts that fail.

Over real gRPC, a replica holds version 1 while versions 2 to 4 are announced, one every ten seconds. Each delta takes
``--seconds`` to code, more than the deadline of a call and than a step. Shown: ``kept_old``, attempts that failed;
``forced_full``, snapshots sent after the first version; the encodings of the versions taken, skipped versions, and the
seconds from the last announcement to serving.

    python benchmarks/weights_slow_publisher.py [--quick] [--seconds 30]
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import tempfile
import threading
import time
from pathlib import Path

from benchmarks._report import report_facts
from benchmarks._weight_versions import POLICY, RUN, VersionMaker, model_specs
from services.common.config.training.policy import WeightsConfig
from services.common.pb import weights_pb2_grpc
from services.common.records.types import WeightVersion
from services.common.rpc.server import Server
from services.common.transfer.servicer import WeightServicer
from services.common.weights.manifest import Encoding, Payload, PayloadRequest
from services.common.weights.snapshot_file import Snapshot
from services.inference.engine.weight_update import WeightUpdate
from services.inference.weights.fetcher import SourceFetcher
from services.inference.weights.mirror import Mirror
from services.inference.weights.updater import WeightUpdater
from services.trainer.publish.deltas import Delta, DeltaMaker
from services.trainer.publish.publisher_store import PublisherStore

_WAIT_S = 300.0


class SlowMaker(DeltaMaker):
    """Takes a fixed time for each coded delta."""

    def __init__(self, seconds: float) -> None:
        super().__init__(1)
        self._seconds = seconds
        self._stop = threading.Event()

    def encode(self, old: Snapshot, new: Snapshot) -> Delta:
        self._stop.wait(self._seconds)
        return super().encode(old, new)

    def stop(self) -> None:
        self._stop.set()
        super().stop()


class CountingStore(PublisherStore):
    """Counts the snapshots that it offers."""

    num_full = 0

    def payload(self, request: PayloadRequest) -> Payload:
        payload = super().payload(request)
        self.num_full += payload.encoding is Encoding.FULL
        return payload


class IdleEngine:
    async def update(self, update: WeightUpdate) -> float:
        return 0.0


async def measured(seconds: float, every_s: float, directory: Path) -> dict[str, object]:
    """The replica's way from version 1 to version 4."""
    store = CountingStore(RUN, POLICY, WeightsConfig(transfer="delta"), maker=SlowMaker(seconds))
    server = Server(service="publisher", instance_id="p", host="127.0.0.1", port=0)
    server.add(
        weights_pb2_grpc.add_WeightServiceServicer_to_server,
        WeightServicer({POLICY: store}),
        "rollmill.v1.WeightService",
    )
    await server.start()
    mirror = Mirror(POLICY)
    updater = WeightUpdater(mirror, IdleEngine(), SourceFetcher(RUN), Mirror.host_tensors)  # type: ignore[arg-type]
    task = asyncio.create_task(updater.run())
    versions = VersionMaker(model_specs(8 << 20), directory, seed=0)
    announced = 0.0
    try:
        for number in range(1, 5):
            path, manifest = versions.write()
            store.add(path)
            announced = time.monotonic()
            updater.offer(
                WeightVersion(policy=POLICY, number=number, digest=manifest.digest, sources=(server.address,))
            )
            if number == 1:
                await until_held(updater, 1)
            elif number < 4:
                await asyncio.sleep(every_s)
        await until_held(updater, 4)
        took = time.monotonic() - announced
        return {
            "encode_s": seconds,
            "kept_old": updater.num_failures,
            "forced_full": store.num_full - 1,
            "taken": [f"{transfer.version} {transfer.encoding}" for transfer in updater.take_transfers()],
            "skipped": store.gauges()["deltas_skipped"],
            "announcement_to_serving_s": took,
        }
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await server.stop(grace_s=0.1)
        store.close()


async def until_held(updater: WeightUpdater, number: int) -> None:
    async with asyncio.timeout(_WAIT_S):
        while updater.held().number != number:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="6 s for a delta instead of --seconds")
    parser.add_argument("--seconds", type=float, default=30.0, help="for each delta")
    arguments = parser.parse_args()
    seconds = 6.0 if arguments.quick else arguments.seconds
    directory = Path(tempfile.mkdtemp(prefix="rollmill-slow-", dir="/dev/shm"))
    try:
        facts = asyncio.run(measured(seconds, seconds / 3, directory))
    finally:
        shutil.rmtree(directory)
    report_facts("weights_slow_publisher", **facts)


if __name__ == "__main__":
    main()
