"""Serves the weight versions of one policy, in a process of its own, so that serving does not use the trainer's interpreter.

    python -m services.trainer.publisher '{"run_id": "RUN", "policy": "model0", "port": 19861}'

    trainer --{"add": path}--> PublisherStore.add
    receiver --GetManifest---> PublisherStore.payload   on this host, maps files: the snapshot, as a file
                                                        holds a version whose snapshot is here: the delta, when
                                                        smaller; coded at its first request, in one thread
                                                        else: the snapshot

The trainer names snapshot files on standard input (JSON lines, each answered by one on standard output). The publisher
maps the files and serves them over ``WeightService``. The publisher ends with its trainer, and imports no torch.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections import OrderedDict
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import structlog
from pydantic import BaseModel

from services.common.config.processes import MetricsConfig
from services.common.config.training import WeightsConfig
from services.common.errors import (
    InfrastructureError,
    NotFoundError,
    RollmillError,
    VersionConflictError,
    VersionUnavailableError,
)
from services.common.prometheus import Metric, serve_metrics
from services.common.rpc.interceptors import booked
from services.common.rpc.server import Server
from services.common.security import identity
from services.common.security.keys import Role
from services.common.system.child import die_with_parent_if_asked
from services.common.system.machine import keep_freed_memory
from services.common.system.threads import Watchdog
from services.common.telemetry.accounts import Activity, ActivityName, TimeAccount, publisher
from services.common.telemetry.logs import configure
from services.common.transfer.bulk import MemoryReader, PayloadReader
from services.common.transfer.servicer import add_weight_service
from services.common.weights.codec import encode_tensor
from services.common.weights.snapshot import (
    BaseVersion,
    Encoding,
    Manifest,
    Payload,
    PayloadNotReadyError,
    PayloadRequest,
    Snapshot,
    TensorEntry,
    delta_payload_id,
    full_payload_id,
    making_deadline_s,
    same_tensors,
    tensor_digest,
)

PUBLISHER_METRICS = (
    Metric("rollmill_published_weight_version", "gauge", "The newest version that can be fetched.", "newest_version"),
    Metric("rollmill_snapshots", "gauge", "Versions kept in full.", "snapshots"),
    Metric("rollmill_deltas", "gauge", "Deltas kept.", "deltas"),
    Metric("rollmill_delta_bytes", "gauge", "Bytes of the deltas kept.", "delta_bytes"),
    Metric("rollmill_deltas_skipped_total", "counter", "Versions without a delta of their own: coding was slower than publishing.", "deltas_skipped"),
    Metric("rollmill_weight_bytes_sent_total", "counter", "Bytes of weights sent.", "bytes_sent"),
)  # fmt: skip
log = structlog.get_logger()

_ACTIVITIES = {
    "/rollmill.v1.WeightService/GetManifest": ActivityName.PREPARING_PAYLOAD,
    "/rollmill.v1.WeightService/FetchWeights": ActivityName.SENDING_WEIGHTS,
}
WAITING_RECEIVERS = 64  # threads in which requests wait for a delta, while others are answered
MOST_THREADS = 4  # two code 1.6 times as fast as one, four 1.9 times: the interpreter lock limits the gain


@dataclass(frozen=True, slots=True)
class Delta:
    """The coded changes from one version to another: the payload that describes them, and their bytes."""

    payload: Payload
    data: bytes


def encode_delta(old: Snapshot, new: Snapshot, threads: ThreadPoolExecutor) -> Delta | None:
    """Code the change between two versions, tensor by tensor in ``threads``.

    None when the versions have other tensors, or the delta is no smaller than the snapshot.
    """
    if not same_tensors(old.manifest.tensors, new.manifest.tensors):
        return None
    began = time.monotonic()
    before = {entry.name: entry for entry in old.manifest.tensors}

    def code(entry: TensorEntry) -> bytes:
        was = before[entry.name]
        return b"" if was.digest == entry.digest else encode_tensor(old.bits(was), new.bits(entry), entry.dtype)

    target = new.manifest
    # The largest first, so that no thread begins with a large one when the others are done.
    order = sorted(target.tensors, key=lambda entry: -entry.size_bytes)
    futures = {entry.name: threads.submit(code, entry) for entry in order}
    coded = {name: future.result() for name, future in futures.items()}
    entries, offset = [], 0
    for entry in target.tensors:
        length = len(coded[entry.name])
        entries.append(replace(entry, offset=offset, length=length))
        offset += length
    data = b"".join(coded[entry.name] for entry in target.tensors)
    payload = Payload(
        payload_id=delta_payload_id(target.policy, old.manifest.version, target.version, tensor_digest(data)),
        encoding=Encoding.DELTA,
        size_bytes=offset,
        target=replace(target, tensors=tuple(entries)),
        base=base_of(old.manifest),
        encode_s=time.monotonic() - began,
    )
    log.info(
        "delta.made",
        payload=payload.payload_id,
        size_bytes=offset,
        full_bytes=target.size_bytes,
        seconds=round(payload.encode_s, 3),
    )
    return Delta(payload, data) if offset < target.size_bytes else None


class PublisherStore:
    """The snapshots of one policy of one run, and the deltas between them: a ``PayloadSource``, independent of gRPC.

    Each delta is coded once, at its first request, in one thread, and all its receivers share its future. Both versions of a
    delta that is being coded stay served. A delta that is not begun when a newer version comes is dropped: its receivers
    want the newer version. One thread calls ``add``; all other methods are safe for threads.
    """

    def __init__(self, run_id: str, policy: str, config: WeightsConfig) -> None:
        self._run_id = run_id
        self._policy = policy
        self._config = config
        self._lock = threading.Lock()  # not held during coding
        self._snapshots: OrderedDict[int, Snapshot] = OrderedDict()
        # By base and target, of held targets; None: the snapshot is no larger.
        self._deltas: dict[tuple[BaseVersion, int], Future[Delta | None]] = {}
        self.newest = -1  # version in the store
        self._num_skipped = 0
        self._is_closed = False
        self._coder = ThreadPoolExecutor(1, "publisher.delta")  # two deltas at once would share the same cores
        self._threads = ThreadPoolExecutor(min(MOST_THREADS, len(os.sched_getaffinity(0))), "delta.encode")

    def gauges(self) -> dict[str, float]:
        """For GetStatus."""
        with self._lock:
            made = self._made()
            return {
                "newest_version": float(self.newest),
                "snapshots": float(len(self._snapshots)),
                "deltas": float(len(made)),
                "delta_bytes": float(sum(delta.payload.size_bytes for delta in made)),
                "deltas_skipped": float(self._num_skipped),
            }

    def add(self, path: Path) -> Manifest:
        """Serve a sealed snapshot. Idempotent.

        Raises:
            VersionConflictError: its number is served with another digest.
            CorruptDataError, OSError: the file is no snapshot.
        """
        snapshot = Snapshot(path)
        manifest = snapshot.manifest
        with self._lock:
            known = self._snapshots.get(manifest.version)
            if known is not None:
                snapshot.close()
                if known.manifest.digest != manifest.digest:
                    raise VersionConflictError(
                        f"version {manifest.version} is served with digest {known.manifest.digest}, "
                        f"not {manifest.digest}"
                    )
                return manifest
            self._snapshots[manifest.version] = snapshot
            self.newest = manifest.version
            for key, future in list(self._deltas.items()):
                if future.cancel():
                    self._num_skipped += 1
                    del self._deltas[key]
            self._drop_old()
        return manifest

    def payload(self, request: PayloadRequest) -> Payload:
        """The payload for a version: the delta from the base when both snapshots are here and it is smaller, else the snapshot.

        Raises:
            VersionUnavailableError: the version belongs to another run or policy, or is not in the store.
            PayloadNotReadyError: the delta is not coded within the request's ``wait_s``.
            InfrastructureError: the publisher stops.
        """
        base, number, config = request.base, request.version, self._config
        with self._lock:
            if number == self.newest:
                self._drop_old(base)
            snapshot = self._snapshots.get(number)
            if request.run_id != self._run_id or request.policy != self._policy or snapshot is None:
                held = f"run {self._run_id}, policy {self._policy}, versions {list(self._snapshots)}"
                raise VersionUnavailableError(
                    f"version {number} of policy {request.policy} of run {request.run_id} is not held here ({held})"
                )
            full = Payload(
                payload_id=full_payload_id(snapshot.manifest),
                encoding=Encoding.FULL,
                size_bytes=snapshot.manifest.size_bytes,
                target=snapshot.manifest,
                file=(snapshot.path, snapshot.data_offset),
            )
            if base is None or config.transfer == "full" or (config.full_every and number % config.full_every == 0):
                return full
            if config.transfer == "auto" and request.can_map:
                return full
            future = self._deltas.get((base, number))
            if future is None or (future.done() and future.exception() is not None):
                old = self._snapshots.get(base.number)
                if old is None or base_of(old.manifest) != base:
                    return full
                try:
                    future = self._coder.submit(encode_delta, old, snapshot, self._threads)
                except RuntimeError as error:
                    raise InfrastructureError("this publisher is stopping") from error
                self._deltas[base, number] = future
        try:
            delta = future.result(min(request.wait_s, making_deadline_s(full.size_bytes)))
        except (TimeoutError, CancelledError, RuntimeError) as error:
            if self._is_closed:
                raise InfrastructureError("this publisher is stopping") from error
            if isinstance(error, RuntimeError):
                raise
            raise PayloadNotReadyError(
                f"the delta from version {base.number} to {number}",
                started=future.running(),
                size_bytes=full.size_bytes,
            ) from None
        return full if delta is None else delta.payload

    def open(self, payload_id: str) -> PayloadReader:
        """Open a payload, whose bytes outlive its version. ``NotFoundError`` when the payload was dropped: ask for the manifest again."""
        with self._lock:
            for snapshot in self._snapshots.values():
                if full_payload_id(snapshot.manifest) == payload_id:
                    return MemoryReader(snapshot.data[: snapshot.manifest.size_bytes])
            for delta in self._made():
                if delta.payload.payload_id == payload_id:
                    return MemoryReader(memoryview(delta.data))
        raise NotFoundError(f"payload {payload_id!r} is gone: ask for the manifest again")

    def close(self) -> None:
        """Cancel coding, and remove the files of all snapshots."""
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._coder.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            for snapshot in self._snapshots.values():
                snapshot.retire()
            self._snapshots.clear()

    def _made(self) -> list[Delta]:
        done = [future for future in self._deltas.values() if future.done()]
        made = [future.result() for future in done if future.exception() is None]
        return [delta for delta in made if delta is not None]

    def _drop_old(self, base: BaseVersion | None = None) -> None:
        """Drop the oldest versions and their deltas, but not ``base``. Versions whose delta is being coded stay."""
        kept = {base.number} if base is not None else set()
        for (other, target), future in self._deltas.items():
            if not future.done():
                kept |= {other.number, target}
        for number in list(self._snapshots)[: -self._config.keep_versions]:
            if number not in kept:
                self._snapshots.pop(number).retire()
        self._deltas = {key: future for key, future in self._deltas.items() if key[1] in self._snapshots}


def base_of(manifest: Manifest) -> BaseVersion:
    """The manifest's version, as the base of a delta."""
    return BaseVersion(number=manifest.version, digest=manifest.digest)


class PublisherSettings(BaseModel):
    """The argument of the process, as JSON."""

    run_id: str  # other runs are refused
    policy: str
    weights: WeightsConfig = WeightsConfig()
    metrics: MetricsConfig = MetricsConfig()
    host: str | None = None  # bind address instead of the section's; without keys only loopback
    port: int | None = None  # instead of the section's; 0 takes a free one
    run_dir: Path | None = None  # where to write logs


def main() -> None:
    arguments = PublisherSettings.model_validate_json(sys.argv[1])
    die_with_parent_if_asked()
    keep_freed_memory(one_arena=True)
    configure("publisher", arguments.run_dir, f"publisher-{arguments.policy}")
    try:
        identity.configure(Role.PUBLISHER)
        asyncio.run(_serve(arguments))
    except RollmillError as error:
        _answer({"error": error.message})
        raise SystemExit(f"error: {error.message}") from None


async def _serve(arguments: PublisherSettings) -> None:
    config = arguments.weights
    store = PublisherStore(arguments.run_id, arguments.policy, config)
    waiting = ThreadPoolExecutor(WAITING_RECEIVERS, "publisher.payload")
    asyncio.get_running_loop().set_default_executor(waiting)
    account = TimeAccount(publisher(arguments.policy), rest=Activity(ActivityName.NOT_ASKED))
    server = Server(
        service="publisher",
        instance_id=f"publisher-{arguments.policy}",
        host=config.host if arguments.host is None else arguments.host,
        port=config.port if arguments.port is None else arguments.port,
        run_id=arguments.run_id,
        port_setting=f"policies.{arguments.policy}.weights.port",
        around=[booked(account, _ACTIVITIES)],
    )
    servicer = await add_weight_service(
        server,
        {arguments.policy: store},
        send_bytes_per_s=config.send_bytes_per_s,
        bulk_wanted="bulk" in config.transports,
    )
    server.set_gauges(lambda: {**store.gauges(), "bytes_sent": float(servicer.budget.num_bytes_sent)})
    server.set_accounts(lambda: [account.state()])
    watchdog = Watchdog()
    watchdog.start()
    await server.start()
    await serve_metrics(
        server,
        arguments.metrics,
        PUBLISHER_METRICS,
        name=f"publisher-{arguments.policy}",
        run_dir=arguments.run_dir,
    )
    _answer({"address": server.address})
    commands = asyncio.create_task(_apply_commands(store, server), name="publisher.commands")
    try:
        await server.wait_for_stop()
    finally:
        watchdog.stop()
        commands.cancel()
        await server.stop(grace_s=1.0)
        store.close()


async def _apply_commands(store: PublisherStore, server: Server) -> None:
    """Add the snapshots that standard input names, until its end: the end of the trainer."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    is_ready = False
    while line := await reader.readline():
        path = Path(json.loads(line)["add"])
        try:
            manifest = store.add(path)
        except (RollmillError, OSError) as error:
            log.error("snapshot.refused", path=str(path), error=str(error))
            _answer({"error": f"{path}: {error}"})
            continue
        if not is_ready:
            server.set_ready()
            is_ready = True
        log.info("snapshot.served", version=manifest.version, size_bytes=manifest.size_bytes)
        _answer({"version": manifest.version, "digest": manifest.digest})
    server.request_stop()


def _answer(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
