"""A model of some gigabytes by every way, end to end: from a publisher process to the tensors of an engine, verified.

A version is sealed in /dev/shm and announced to the publisher. A replica's updater fetches, verifies and mirrors it, and an
engine without a model takes it as the torch engine does (``weights_transfer.py``). The ways, each with a fresh mirror except
for the delta, which follows on the first one's version:

    bulk     the whole snapshot over ZeroMQ
    grpc     the whole snapshot over gRPC
    delta    1% changed elements, coded by the publisher
    mapped   the whole snapshot, mapped from /dev/shm

After each the engine's tensors have the manifest's digests. Takes four times the model in memory, half of that in /dev/shm.
Part of ``rehearsal_8b.py``.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks._needs import why_no_memory, why_no_room
from benchmarks._weight_versions import POLICY, RUN, VersionMaker, model_specs
from benchmarks.weights_transfer import HeldTensors, Receiver
from services.common.config.training import WeightsConfig
from services.common.records import WeightVersion
from services.common.weights.snapshot import Manifest, algorithm_of, tensor_digest
from services.trainer.publisher_process import PublisherProcess

SHARED_MEMORY = Path("/dev/shm")
WAYS = ("bulk", "delta", "grpc", "mapped")
_SAMPLE_S = 0.2


def why_not(size_bytes: int) -> str | None:
    """The reason why this machine cannot hold such a model four times."""
    return why_no_memory(5 * size_bytes) or why_no_room(int(2.2 * size_bytes))


def transport_rows(size_bytes: int) -> dict[str, object]:
    """One row for each way as ``transports``, and the peak of memory in all."""
    directory = Path(tempfile.mkdtemp(prefix="rollmill-rehearsal-", dir=SHARED_MEMORY))
    publisher = PublisherProcess(
        run_id=RUN, policy=POLICY, config=WeightsConfig(port=0, transfer="delta"), run_dir=directory / "run"
    )
    try:
        publisher.start()
        with _Memory(directory, publisher) as memory:
            rows = asyncio.run(_Ways(publisher, VersionMaker(model_specs(size_bytes), directory, seed=7)).run())
    finally:
        publisher.stop()
        shutil.rmtree(directory)
    return {"model_gb": size_bytes / 1e9, "transports": rows, "transports_peak_gib": memory.peak_bytes / 2**30}


class _Ways:
    """Takes two versions by all ways."""

    def __init__(self, publisher: PublisherProcess, versions: VersionMaker) -> None:
        self._publisher = publisher
        self._versions = versions
        self._manifest: Manifest
        self._engine: HeldTensors
        self._announce_s = 0.0

    async def run(self) -> list[dict[str, Any]]:
        """The rows of the ways, in the order of ``WAYS``."""
        self._publish()
        self._engine = HeldTensors(self._manifest)
        receiver, first = await self._whole("bulk")
        self._publish()
        rows = [first, await self._take(receiver, "delta")]
        assert rows[1]["encoding"] == "delta", "the publisher has a delta for a receiver with its base"
        await receiver.stop()
        del receiver
        for transport in ("grpc", "mapped"):
            receiver, row = await self._whole(transport)
            rows.append(row)
            await receiver.stop()
            del receiver
        return rows

    async def _whole(self, transport: str) -> tuple[Receiver, dict[str, Any]]:
        """A fresh mirror takes the version whole; the engine has none of its values before."""
        for tensor in self._engine.weights.values():
            tensor.zero_()
        receiver = Receiver(self._engine, [transport])
        row = await self._take(receiver, transport)
        assert (row["encoding"], row["transport"]) == ("full", transport)
        return receiver, row

    async def _take(self, receiver: Receiver, way: str) -> dict[str, Any]:
        version = WeightVersion(
            policy=POLICY,
            number=self._manifest.version,
            digest=self._manifest.digest,
            sources=(self._publisher.address,),
        )
        began = time.perf_counter()
        serving_s = await receiver.take(version) - began
        self._check()
        last = receiver.updater.last
        assert last is not None
        return {
            "way": way, "encoding": last.encoding, "transport": last.transport,
            "payload_mb": last.payload_size_bytes / 1e6, "announce_s": self._announce_s, "serving_s": serving_s,
            "encode_s": last.encode_s, "fetch_s": last.fetch_s, "verify_s": last.verify_s, "write_s": last.write_s,
            "pause_s": last.pause_s, "failures": receiver.updater.num_failures,
        }  # fmt: skip

    def _publish(self) -> None:
        path, self._manifest = self._versions.write()
        began = time.perf_counter()
        self._publisher.announce(path)
        self._announce_s = time.perf_counter() - began

    def _check(self) -> None:
        for entry in self._manifest.tensors:
            bits = self._engine.weights[entry.name].view(torch.int16).view(-1).numpy().view("<u2")
            assert tensor_digest(bits, algorithm_of(entry.digest)) == entry.digest, f"the engine's {entry.name} differs"


class _Memory:
    """The peak of both processes' own memory and of the files, by samples."""

    def __init__(self, directory: Path, publisher: PublisherProcess) -> None:
        self.peak_bytes = 0
        self._directory = directory
        self._publisher = publisher
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="rehearsal.memory", daemon=True)

    def __enter__(self) -> _Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stopping.wait(_SAMPLE_S):
            files = sum(file.stat().st_size for file in self._directory.rglob("*") if file.is_file())
            own = sum(_anonymous_bytes(pid) for pid in ("self", str(self._publisher.pid)))
            self.peak_bytes = max(self.peak_bytes, files + own)


def _anonymous_bytes(pid: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))
