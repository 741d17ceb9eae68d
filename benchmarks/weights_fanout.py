"""Sends one version to sixteen replicas: measures the bytes of the publisher, and the time until all serve the version.

Each sender (the publisher, and every replica that relays) may send so many bytes per second in all, such that one copy
takes 8 s (2 s with --quick). The replicas are processes with the real updater, relay and weight service, a scripted
engine, and a mirror that starts empty; the plan is the orchestrator's. Arms, in one run:

- alone: one replica fetches from the publisher;
- together: sixteen with the plan: each relays one shard. egress_ratio is the publisher's bytes over the payload,
  time_ratio the time until all serve the version over the time of one alone;
- directly: replicas fetch from the publisher without a plan, as most systems do (with --quick six of them);
- killed: together, and one relay is killed -9 in mid-transfer; the others must finish;
- far: one replica behind a proxy with a 300 ms round trip and the bandwidth of one payload in 2 s: tokens per second
  of its engine while following versions, over a replica that follows them directly (throughput_ratio).

    python benchmarks/weights_fanout.py [--quick] [--receivers 16] [--seed 5]
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import structlog

from benchmarks._needs import why_no_room
from benchmarks._receivers import Receiver
from benchmarks._report import report, report_nothing
from benchmarks._slow_link import SlowLink
from benchmarks._weight_versions import POLICY, RUN, VersionMaker, model_specs
from services.common.config.training import WeightsConfig
from services.common.pb import status_pb2, status_pb2_grpc
from services.common.records import FetchPlan, WeightVersion
from services.orchestrator.versions import FanOut
from services.orchestrator.versions import Receiver as Wanting
from services.trainer.publisher_process import PublisherProcess

MIB = 1 << 20
_COPIES = 8  # two publishers, each with three versions kept and one being written


class Publisher:
    """The real publisher process over made-up versions."""

    def __init__(self, size_bytes: int, seed: int, send_bytes_per_s: float) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="rollmill-bench-", dir="/dev/shm")
        self._maker = VersionMaker(model_specs(size_bytes), Path(self._directory.name), seed)
        self.size_bytes = self._maker.size_bytes
        config = WeightsConfig(port=0, transfer="delta", keep_versions=3, send_bytes_per_s=send_bytes_per_s)
        self._process = PublisherProcess(run_id=RUN, policy=POLICY, config=config)
        self._process.start()

    def publish(self) -> WeightVersion:
        path, manifest = self._maker.write()
        self._process.announce(path)
        return WeightVersion(
            policy=POLICY, number=manifest.version, digest=manifest.digest, sources=(self._process.address,)
        )

    @property
    def address(self) -> str:
        return self._process.address

    @property
    def num_bytes_sent(self) -> float:
        """As the process itself counts."""
        import grpc

        with grpc.insecure_channel(self._process.address) as channel:
            answer = status_pb2_grpc.StatusServiceStub(channel).GetStatus(status_pb2.GetStatusRequest(), timeout=10)
        return float(answer.gauges["bytes_sent"])

    def close(self) -> None:
        self._process.stop()
        self._directory.cleanup()


def plans_of(receivers: list[Receiver], max_relays: int) -> list[FetchPlan | None]:
    """As the orchestrator makes them when a version is published."""
    fanout = FanOut({POLICY: max_relays})
    names = [str(number) for number in range(len(receivers))]
    fanout.published(
        POLICY, [Wanting(replica_id=n, address=r.address, base=(-1, "")) for n, r in zip(names, receivers, strict=True)]
    )
    return [fanout.take_plan(POLICY, name) for name in names]


def fetch_all(
    publisher: Publisher,
    version: WeightVersion,
    receivers: list[Receiver],
    plans: list[FetchPlan | None],
    *,
    kill_after_s: float | None = None,
) -> tuple[float, float]:
    """Seconds until all serve the version, and how many copies the publisher sent."""
    sent, began = publisher.num_bytes_sent, time.time()
    for receiver, plan in zip(receivers, plans, strict=True):
        receiver.offer(version, plan)
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        assert receivers[0].process.pid is not None
        os.kill(receivers[0].process.pid, signal.SIGKILL)
        receivers = receivers[1:]
    ended = [receiver.serving(600.0)[0] for receiver in receivers]
    return max(ended) - began, (publisher.num_bytes_sent - sent) / publisher.size_bytes


def follow(receiver: Receiver, publisher: Publisher, source: str, seconds: float) -> float:
    """Tokens per second of a replica, at any place, that is offered a version every second."""
    began, tokens = time.time(), receiver.num_tokens()
    while time.time() - began < seconds:
        version = replace(publisher.publish(), sources=(source,))
        receiver.offer(version)
        receiver.serving(120.0)
        time.sleep(max(0.0, 1.0 - (time.time() - began) % 1.0))
    return (receiver.num_tokens() - tokens) / (time.time() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a 16 MiB model, one copy in 2 s; about a minute")
    parser.add_argument("--receivers", type=int, default=16)
    parser.add_argument("--seed", type=int, default=5)
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    size, copy_s, repeats = (16 * MIB, 2.0, 1) if arguments.quick else (64 * MIB, 8.0, 3)
    size = sum(spec.size_bytes for spec in model_specs(size))  # whole layers
    if reason := why_no_room(_COPIES * size):
        report_nothing("weights_fanout", reason)
        return
    rate = size / copy_s
    publisher = Publisher(size, arguments.seed, rate)
    receivers = [Receiver(rate) for _ in range(arguments.receivers)]
    try:
        for receiver in receivers:
            receiver.ready()
        version = publisher.publish()
        alone, together, egress = [], [], []
        for _ in range(repeats):
            alone.append(fetch_all(publisher, version, receivers[:1], [None])[0])
            _reset(receivers[:1])
            seconds, copies = fetch_all(publisher, version, receivers, plans_of(receivers, 16))
            together.append(seconds)
            egress.append(copies)
            _reset(receivers)
        one = statistics.median(alone)
        print(
            f"alone {one:.1f} s; {len(receivers)} together {statistics.median(together):.1f} s, "
            f"the publisher sends {statistics.median(egress):.2f} copies",
            flush=True,
        )
        count = 6 if arguments.quick else len(receivers)
        direct_s, direct_copies = fetch_all(publisher, version, receivers[:count], [None] * count)
        print(f"{count} directly {direct_s:.1f} s, the publisher sends {direct_copies:.2f} copies", flush=True)
        _reset(receivers)
        killed_s, killed_copies = fetch_all(
            publisher, version, receivers, plans_of(receivers, 16), kill_after_s=0.4 * copy_s
        )
        print(f"a relay killed in mid-transfer: {killed_s:.1f} s, {killed_copies:.2f} copies", flush=True)
        near, far = receivers[1], receivers[2]
        unhindered = Publisher(size, arguments.seed + 1, 0.0)
        link = SlowLink(unhindered.address, round_trip_s=0.3, bytes_per_s=size / 2)
        _reset([near, far])
        seconds = 6.0 if arguments.quick else 20.0
        ratios, speeds = [], []
        for _ in range(repeats + 1):
            direct = follow(near, unhindered, unhindered.address, seconds / 2)
            slow = follow(far, unhindered, link.address, seconds / 2)
            ratios.append(slow / direct)
            speeds.append(slow)
        unhindered.close()
    finally:
        for receiver in receivers:
            receiver.end()
        publisher.close()
    throughput_ratio = statistics.median(ratios)
    print(
        f"behind the slow link {statistics.median(speeds):.0f} tokens/s, {throughput_ratio:.1%} of direct", flush=True
    )
    time_ratio = statistics.median(together) / one
    report(
        "weights_fanout",
        statistics.median(together),
        direct_s,
        direct_s / count * len(receivers) / statistics.median(together),
        (max(together) - min(together)) / 2 / statistics.median(together),
        egress_ratio=max(egress),
        time_ratio=time_ratio,
        alone_s=one,
        receivers=len(receivers),
        direct_receivers=count,
        direct_egress_ratio=direct_copies,
        killed_s=killed_s,
        killed_egress_ratio=killed_copies,
        throughput_ratio=throughput_ratio,
        payload_bytes=publisher.size_bytes,
    )


def _reset(receivers: list[Receiver]) -> None:
    for receiver in receivers:
        if receiver.process.is_alive():
            receiver.reset()


if __name__ == "__main__":
    main()
