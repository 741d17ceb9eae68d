"""Measures the time of a weight version from a publisher to a serving engine; two processes, on different cores if
there are two.

A synthetic model of 1 GiB in bf16, 1% changed from version to version (``_weight_versions.py``). Ours is the real
thing: the publisher process, gRPC, the bulk plane, the updater, the mirror; the engine is a stand-in that holds torch
tensors and changes them as the torch engine does, without a model to decode. Arms take turns; medians are reported.

(a) delta: from "snapshot sealed" (the announcement to the publisher begins) to "the engine serves the version",
verified,
    against the plain scheme (``_plain_sync.py``: compare, u32 + bf16, one TCP stream, the receiver rewrites its whole
    file, the engine loads the file). ``delta_ratio``; ``delta_ratio_numpy`` has the fastest compare that numpy can
    write.
(b) full: bytes in a fresh buffer of the receiver, over the bulk plane (ZeroMQ) and over gRPC, against raw sendfile from
    the same file into such a buffer. ``bulk_vs_sendfile``, ``grpc_vs_sendfile``: times, so below 1 is faster.
(c) same host: from the offer of a version to the engine serving the version, mapped, verified, as a whole, against a
memcpy of
    the model between two warm buffers by one thread. ``mapped_vs_memcpy``.

``extra_delta_bytes`` and ``extra_full_bytes`` are the rise of the receiver's resident memory above its level before the
transfer (mirror and engine in place), the bounds beside them are the decoded changes and two of the largest tensors.

    python benchmarks/weights_transfer.py [--quick] [--size-mib 1024] [--repeats 5] [--cores 0,1:2,3] [--seed 7]

Each side has up to two cores of its own; on two cores one each, so the publisher's threads do not help there. Needs
about ten times the model in memory, half in /dev/shm.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch

from benchmarks._cores import split
from benchmarks._needs import why_no_memory, why_no_room
from benchmarks._plain_sync import PlainReceiver, PlainSender, receive_into
from benchmarks._report import median_and_spread, report, report_nothing
from benchmarks._weight_versions import DENSITY, POLICY, RUN, VersionMaker, model_specs
from services.common.config.training import WeightsConfig
from services.common.records import WeightVersion
from services.common.weights.snapshot import DEFAULT_DIRECTORIES, Manifest, Snapshot
from services.inference.engine.base import WeightUpdate
from services.inference.engine.torch.decoder import prepare
from services.inference.weights.fetch import receive_buffer
from services.inference.weights.mirror import Mirror
from services.inference.weights.updater import SourceFetcher, WeightUpdater
from services.trainer.publisher_process import PublisherProcess

WAIT_S = 120.0


class HeldTensors:
    """An engine without a model: holds tensors and changes them as the torch engine does."""

    def __init__(self, manifest: Manifest) -> None:
        self.weights = {t.name: torch.zeros(t.shape, dtype=getattr(torch, t.dtype)) for t in manifest.tensors}
        self.served_at = 0.0
        self.decoded_bytes = 0
        self._served = asyncio.Event()

    async def update(self, update: WeightUpdate) -> float:
        prepared = await asyncio.to_thread(prepare, update, self.weights)
        began = time.perf_counter()
        prepared.apply()
        self.served_at = time.perf_counter()
        self.decoded_bytes = sum(c.size_bytes for changes in update.changes.values() for c in changes)
        self._served.set()
        return self.served_at - began

    async def served(self) -> float:
        async with asyncio.timeout(WAIT_S):
            await self._served.wait()
        self._served.clear()
        return self.served_at


class Receiver:
    """Mirror, engine and updater, as a replica wires them."""

    def __init__(self, engine: HeldTensors, transports: Iterable[str]) -> None:
        self.mirror, self.engine = Mirror(POLICY), engine
        fetcher = SourceFetcher(RUN, tuple(transports))
        self.updater = WeightUpdater(self.mirror, engine, fetcher)  # type: ignore[arg-type]
        self._task = asyncio.create_task(self.updater.run())

    async def take(self, version: WeightVersion) -> float:
        """Offer the version; returns the time at which the engine serves the version, on the clock of
        ``time.perf_counter``."""
        self.updater.offer(version)
        served_at = await self.engine.served()
        while self.updater.held().number != version.number:  # noqa: ASYNC110 (a step of the event loop later)
            await asyncio.sleep(0)
        return served_at

    async def stop(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task


@dataclass(slots=True)
class Times:
    """The results of each repetition: seconds by arm, and facts about its stages."""

    by_arm: dict[str, list[float]] = field(default_factory=dict)
    by_fact: dict[str, list[float]] = field(default_factory=dict)

    def add(self, arm: str, seconds: float) -> None:
        self.by_arm.setdefault(arm, []).append(seconds)

    def note(self, **facts: float) -> None:
        for name, value in facts.items():
            self.by_fact.setdefault(name, []).append(value)

    @property
    def facts(self) -> dict[str, float]:
        """Medians."""
        return {name: statistics.median(values) for name, values in self.by_fact.items()}

    def median(self, arm: str) -> float:
        return median_and_spread(self.by_arm[arm])[0]

    def spread(self, arm: str) -> float:
        return median_and_spread(self.by_arm[arm])[1]


def memcpy_s(size_bytes: int, repeats: int) -> float:
    """One thread, both buffers warm."""
    source, target = np.ones(size_bytes, dtype=np.uint8), np.ones(size_bytes, dtype=np.uint8)
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


class PeakMemory:
    """How far resident memory rises inside the block, above its level at the begin."""

    def __enter__(self) -> PeakMemory:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # or what earlier transfers freed would hide what this one takes
        Path("/proc/self/clear_refs").write_text("5")
        self._before = _status("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        self.extra_bytes = max(0, _status("VmHWM") - self._before)


def _status(name: str) -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) << 10


class Benchmark:
    """Publisher and plain sender on some cores, this process on others."""

    def __init__(self, arguments: argparse.Namespace, scratch: Path) -> None:
        theirs, ours = arguments.cores
        self.repeats = arguments.repeats
        self.versions = VersionMaker(model_specs(arguments.size_mib << 20), DEFAULT_DIRECTORIES[0], arguments.seed)
        self.publisher = PublisherProcess(
            run_id=RUN, policy=POLICY, config=WeightsConfig(port=0, transfer="delta"), run_dir=scratch
        )
        os.sched_setaffinity(0, theirs)  # the publisher inherits it
        self.publisher.start()
        self.plain_sender = PlainSender(theirs)
        os.sched_setaffinity(0, ours)
        self.plain = PlainReceiver(self.versions.specs, DEFAULT_DIRECTORIES[0] / f"rollmill-plain-{os.getpid()}")
        self.times = Times()

    def close(self) -> None:
        self.publisher.stop()
        self.plain_sender.close()
        self.plain.path.unlink(missing_ok=True)

    async def run(self) -> None:
        path, manifest = self.versions.write()
        self.plain_sender.load(path)
        self.plain.start_from(Snapshot(path))
        self.publisher.announce(path)
        engine = HeldTensors(manifest)
        receiver = Receiver(engine, ["bulk", "grpc"])
        await receiver.take(self._announced(manifest))
        for number in range(self.repeats):
            await self._delta(receiver, verify_plain=number == 0)
        await self._memory(receiver)
        await receiver.stop()
        for _ in range(self.repeats):
            await self._full()
        for _ in range(self.repeats):
            await self._mapped(engine)

    def _announced(self, manifest: Manifest) -> WeightVersion:
        return WeightVersion(
            policy=POLICY, number=manifest.version, digest=manifest.digest, sources=(self.publisher.address,)
        )

    async def _delta(self, receiver: Receiver, verify_plain: bool) -> None:
        path, manifest = self.versions.write()
        began = time.perf_counter()
        await asyncio.to_thread(self.publisher.announce, path)
        announced = time.perf_counter()
        served_at = await receiver.take(self._announced(manifest))
        self.times.add("delta", served_at - began)
        last = receiver.updater.last
        assert last is not None and last.encoding == "delta"
        self.times.note(
            delta_announce_s=announced - began,
            delta_encode_s=last.encode_s,  # most of the fetch: the answer to GetManifest waits for it
            delta_fetch_s=last.fetch_s,
            delta_verify_s=last.verify_s,
            delta_write_s=last.write_s,
            delta_pause_s=last.pause_s,
            delta_bytes=last.payload_size_bytes,
            delta_bits_per_change=last.bits_per_change,
        )
        self.plain_sender.load(path)
        await asyncio.to_thread(self._plain_delta)
        if verify_plain:
            assert self.plain.equals(Snapshot(path)), "the plain scheme must arrive at the same weights"

    def _plain_delta(self) -> None:
        """Twice from the same base: the changes are absolute values, so taking them again costs the same."""
        for compare in ("torch", "numpy"):
            began = time.perf_counter()
            self.plain_sender.send_delta(compare)
            self.plain.take(self.plain_sender.address)
            self.times.add(f"plain_{compare}", time.perf_counter() - began)
            self.times.note(**{f"plain_{compare}_compare_s": self.plain_sender.done()})

    async def _memory(self, receiver: Receiver) -> None:
        """A delta, then a full version into a mirror that is full already."""
        path, manifest = self.versions.write()
        await asyncio.to_thread(self.publisher.announce, path)
        largest = 2 * max(entry.size_bytes for entry in manifest.tensors)
        with PeakMemory() as peak:
            await receiver.take(self._announced(manifest))
        self.times.note(extra_delta_bytes=peak.extra_bytes, extra_delta_bound=receiver.engine.decoded_bytes + largest)
        path, manifest = self.versions.write()
        await asyncio.to_thread(self.publisher.announce, path)
        receiver.mirror.dirty = True  # so that nothing but a full version will do
        with PeakMemory() as peak:
            await receiver.take(self._announced(manifest))
        assert receiver.updater.last is not None and receiver.updater.last.encoding == "full"
        self.times.note(extra_full_bytes=peak.extra_bytes, extra_full_bound=self.versions.size_bytes + largest)
        self.plain_sender.load(path)
        self.newest = self._announced(manifest)

    async def _full(self) -> None:
        for transport in ("bulk", "grpc"):
            began = time.perf_counter()
            fetched = await SourceFetcher(RUN, [transport]).fetch(self.newest, None, None)
            self.times.add(transport, time.perf_counter() - began)
            assert fetched.transport == transport
            del fetched
        began = time.perf_counter()
        self.plain_sender.send_file()
        buffer = receive_buffer(self.versions.size_bytes)
        await asyncio.to_thread(receive_into, self.plain_sender.address, buffer)
        self.times.add("sendfile", time.perf_counter() - began)
        self.plain_sender.done()

    async def _mapped(self, engine: HeldTensors) -> None:
        receiver = Receiver(engine, ["mapped"])
        began = time.perf_counter()
        self.times.add("mapped", await receiver.take(self.newest) - began)
        last = receiver.updater.last
        assert last is not None and last.transport == "mapped"
        self.times.note(
            mapped_fetch_s=last.fetch_s,
            mapped_verify_s=last.verify_s,
            mapped_write_s=last.write_s,
            mapped_pause_s=last.pause_s,
        )
        await receiver.stop()
        self.times.add("memcpy", memcpy_s(self.versions.size_bytes, 3))


def main() -> None:
    arguments = _parser().parse_args()
    if arguments.quick:
        arguments.size_mib, arguments.repeats = min(arguments.size_mib, 256), min(arguments.repeats, 3)
    size_bytes = arguments.size_mib << 20
    if reason := why_no_memory(10 * size_bytes) or why_no_room(5 * size_bytes):
        report_nothing("weights_transfer", f"{reason}; a smaller model is --size-mib")
        return
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        benchmark = Benchmark(arguments, Path(scratch))
        try:
            asyncio.run(benchmark.run())
        finally:
            benchmark.close()
    _print(benchmark, arguments)


def _print(benchmark: Benchmark, arguments: argparse.Namespace) -> None:
    times = benchmark.times
    publisher_cores, receiver_cores = arguments.cores
    size = benchmark.versions.size_bytes
    control = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    print(
        f"{size / (1 << 20):.0f} MiB of bf16{' (--quick)' if arguments.quick else ''}, {DENSITY:.0%} changed, "
        f"{benchmark.repeats} repeats, cores of publisher {publisher_cores} and receiver {receiver_cores}, "
        f"TCP congestion control {control}"
    )
    for arm, seconds in times.by_arm.items():
        middle, spread = median_and_spread(seconds)
        print(f"{arm:>12}: {middle:7.3f} s ±{spread:4.0%}   {size / middle / (1 << 30):6.2f} GiB/s of model")
    for fact, value in times.facts.items():
        print(f"{fact:>24}: {value:,.4g}" if value < 1e6 else f"{fact:>24}: {value / (1 << 20):,.1f} MiB")
    ratio = times.median("plain_torch") / times.median("delta")
    report(
        "weights_transfer",
        ours=times.median("delta"),
        theirs=times.median("plain_torch"),
        ratio=ratio,
        spread=times.spread("delta"),
        delta_ratio=ratio,
        delta_ratio_numpy=times.median("plain_numpy") / times.median("delta"),
        bulk_vs_sendfile=times.median("bulk") / times.median("sendfile"),
        grpc_vs_sendfile=times.median("grpc") / times.median("sendfile"),
        mapped_vs_memcpy=times.median("mapped") / times.median("memcpy"),
        congestion_control=control,
        size_bytes=size,
        repeats=benchmark.repeats,
        cores=len({*publisher_cores, *receiver_cores}),
        publisher_cores=publisher_cores,
        receiver_cores=receiver_cores,
        quick=arguments.quick,
        medians_s={arm: times.median(arm) for arm in times.by_arm},
        spreads={arm: times.spread(arm) for arm in times.by_arm},
        **_facts(times.facts),
    )


def _facts(facts: dict[str, float]) -> dict[str, Any]:
    return {name: int(value) if name.endswith(("bytes", "bound")) else value for name, value in facts.items()}


def sides(text: str) -> list[list[int]]:
    """Cores of the publisher and of the receiver."""
    mine = {str(core) for core in os.sched_getaffinity(0)}
    lists = [side.split(",") for side in text.split(":")]
    if len(lists) != 2 or not all(mine.issuperset(side) for side in lists):
        there = ", ".join(sorted(mine, key=int))
        raise argparse.ArgumentTypeError(
            f"{text!r} must be two lists such as 0:1; the cores of this process are {there}"
        )
    return [[int(core) for core in side] for side in lists]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="256 MiB and three repeats: less than a minute")
    parser.add_argument("--size-mib", type=int, default=1024, help="bytes of the model")
    parser.add_argument("--repeats", type=int, default=5, help="of every arm")
    parser.add_argument(
        "--cores", type=sides, default=split(2, at_most=2), metavar="0,1:2,3",
        help="of the publisher, and of the receiver; left out, two each, or half of the cores",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=7, help="of weights and changes")
    return parser


if __name__ == "__main__":
    main()
