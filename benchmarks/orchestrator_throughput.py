"""Sequences per second from issue to pulled batch, and how long one takes, through the real orchestrator.

Three workloads over sequences of 1,000 policy tokens, task groups of 8, all processes on ``--cores`` cores:

* *throughput*: replicas answer at once, the trainer pulls batches of 256 and publishes at once, max_staleness 2.
  Counted from the second batch on.
* *latency*: one task group of 8 at a time, due at seeded exponential gaps, 96 sequences per second on average. A group
  is issuable when the version before is published; the clock runs from the moment it is *due* until the trainer holds
  the group.
* *paced*, of ours alone: 96 rollouts per second end, one at a time at seeded exponential gaps, in any order; batches of
  256, max_staleness 2. ``finish_to_batch`` is from the end of the last rollout of a batch until the trainer holds all
  of the batch.

``orchestrator_cpu_ms`` are those of the orchestrator's process per trained sequence when saturated; ``all_cpu_ms`` are
those of all three, which share the cores. ``journal_bytes_per_token`` counts the segments.

Ours: orchestrator, scripted replica and scripted trainer as processes, over gRPC, every record journaled before it is
acknowledged. Theirs: a hub polled over HTTP that moves pickled arrays and keeps them in memory only.

    python benchmarks/orchestrator_throughput.py [--quick] [--cores 2] [--seed 7]
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import pickle
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from contextlib import closing
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._bench import ROOT, free_port, kill, median_and_spread, orchestrator, pin, report, spawn, tree_cpu_s
from benchmarks._pace import FINISHED_AT, PacedReplica
from benchmarks._peers import NUM_PROMPT_TOKENS, Rollouts, ScriptedReplica, ScriptedTrainer
from services.common.config.loading import save_resolved, validate
from services.orchestrator.journal import entries
from services.orchestrator.journal.reader import JournalReader

# --- The other arm of the orchestrator benchmark: a hub that is polled over HTTP and moves pickled arrays.


POLL_S = 0.1  # between two requests without a task or batch in the answer


class Hub:
    def __init__(self, batch_size: int, group_size: int, max_staleness: int) -> None:
        self._batch_size = batch_size
        self._group_size = group_size
        self._quota = (max_staleness + 1) * batch_size
        self._lock = threading.Lock()
        self._ready: deque[dict[str, Any]] = deque()
        self._outstanding = 0  # issued and not yet trained
        self._version = 0
        self._issued = 0

    def task(self) -> dict[str, Any] | None:
        with self._lock:
            if self._outstanding >= self._quota:
                return None
            self._outstanding += self._group_size
            self._issued += 1
            return {"group": self._issued, "size": self._group_size, "version": self._version, "question": "q"}

    def put(self, sequence: dict[str, Any]) -> None:
        with self._lock:
            self._ready.append(sequence)

    def batch(self) -> list[dict[str, Any]] | None:
        with self._lock:
            if len(self._ready) < self._batch_size:
                return None
            return [self._ready.popleft() for _ in range(self._batch_size)]

    def trained(self, version: int) -> None:
        with self._lock:
            self._version = version
            self._outstanding -= self._batch_size


def serve(port: int, batch_size: int, group_size: int, max_staleness: int) -> None:
    hub = Hub(batch_size, group_size, max_staleness)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True
        wbufsize = -1  # one write per answer

        def do_GET(self) -> None:
            if self.path == "/task":
                self._answer(json.dumps(hub.task()).encode())
            else:
                batch = hub.batch()
                self._answer(b"" if batch is None else pickle.dumps(batch, protocol=pickle.HIGHEST_PROTOCOL))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/sequence":
                hub.put(pickle.loads(body))
            else:
                hub.trained(int(body))
            self._answer(b"")

        def _answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    server.serve_forever(poll_interval=0.5)


class Client:
    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)

    def get(self, path: str) -> bytes:
        self._connection.request("GET", path)
        return self._connection.getresponse().read()

    def post(self, path: str, body: bytes) -> None:
        self._connection.request("POST", path, body)
        self._connection.getresponse().read()


def replica(port: int, num_tokens: int, num_threads: int, seed: int) -> None:
    """Workers that each poll for a task and post its sequences."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 50_000, num_tokens).astype(np.int32)
    logprobs = -rng.exponential(1.0, num_tokens).astype(np.float32)

    def work() -> None:
        client = Client(port)
        while True:
            task = json.loads(client.get("/task"))
            if task is None:
                time.sleep(POLL_S)
                continue
            for index in range(task["size"]):
                sequence = {
                    "group": task["group"],
                    "index": index,
                    "reward": float(index % 2),
                    "token_ids": ids,
                    "logprobs": logprobs,
                    "versions": np.full(num_tokens, task["version"], dtype=np.int32),
                    "loss_mask": np.ones(num_tokens, dtype=bool),
                }
                client.post("/sequence", pickle.dumps(sequence, protocol=pickle.HIGHEST_PROTOCOL))

    threads = [threading.Thread(target=work, daemon=True) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Trainer:
    def __init__(self, port: int) -> None:
        self._client = Client(port)

    def pull(self) -> list[dict[str, Any]]:
        while not (body := self._client.get("/batch")):
            time.sleep(POLL_S)
        batch: list[dict[str, Any]] = pickle.loads(body)
        return batch

    def publish(self, version: int) -> None:
        self._client.post("/version", str(version).encode())


# --- The benchmark itself.


NUM_TOKENS = 1000
GROUP_SIZE = 8
BATCH = 256
MAX_STALENESS = 2
RATE = 96.0  # sequences per second of the latency and the paced workload
NUM_PACED_SLOTS = 256  # rollouts that are played at once
WARM_UP = 1  # batches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="at most a minute")
    parser.add_argument("--cores", type=int, default=2, help="cores that all processes share, if there are so many")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        _play(options.role, options.port, options.seed)
        return
    cores = pin(options.cores)
    seconds, repeats, num_due, num_paced = (4.0, 2, 40, 6) if options.quick else (15.0, 5, 600, 100)
    gaps = _gaps(num_due, options.seed)
    ours, theirs = [], []
    for _ in range(repeats):  # interleaved: a busy machine slows both
        ours.append(_ours(_Throughput(seconds), BATCH, MAX_STALENESS, options.seed))
        theirs.append(_theirs(lambda trainer: _throughput_http(trainer, seconds), BATCH, MAX_STALENESS, options.seed))
    our_delays = _ours(lambda trainer, _: _latency_grpc(trainer, gaps), GROUP_SIZE, 0, options.seed)
    their_delays = _theirs(lambda trainer: _latency_http(trainer, gaps), GROUP_SIZE, 0, options.seed)
    paced = _ours(lambda trainer, _: _paced_grpc(trainer, num_paced), BATCH, MAX_STALENESS, options.seed, paced=True)
    our_rate, spread = median_and_spread([one.rate for one in ours])
    their_rate, their_spread = median_and_spread(theirs)
    report(
        "orchestrator_throughput",
        our_rate,
        their_rate,
        our_rate / their_rate,
        spread,
        unit="sequences of 1000 tokens per second",
        their_spread=their_spread,
        p50_ms=_percentile_ms(our_delays, 50),
        p99_ms=_percentile_ms(our_delays, 99),
        their_p50_ms=_percentile_ms(their_delays, 50),
        their_p99_ms=_percentile_ms(their_delays, 99),
        trained_per_s=our_rate,
        finish_to_batch_p50_ms=_percentile_ms(paced, 50),
        finish_to_batch_p99_ms=_percentile_ms(paced, 99),
        num_paced_batches=len(paced),
        journal_bytes_per_token=statistics.median(one.bytes_per_token for one in ours),
        orchestrator_cpu_ms=statistics.median(one.orchestrator_cpu_ms for one in ours),
        all_cpu_ms=statistics.median(one.all_cpu_ms for one in ours),
        latency_rate=RATE,
        cores=cores,
        repeats=repeats,
        seed=options.seed,
    )


def _percentile_ms(delays: list[float], percent: float) -> float:
    return float(np.percentile(delays, percent) * 1000)


def _gaps(count: int, seed: int) -> list[float]:
    rng = random.Random(seed)
    return [rng.expovariate(RATE / GROUP_SIZE) for _ in range(count)]


# --- ours ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Ours:
    """The parts of one run of ours."""

    run_dir: Path
    orchestrator: subprocess.Popen[bytes]
    replica: subprocess.Popen[bytes]


def _ours(workload: Any, batch: int, max_staleness: int, seed: int, *, paced: bool = False) -> Any:
    with tempfile.TemporaryDirectory(prefix="rollmill-bench-") as folder:
        port = free_port()
        _write_recipe(Path(folder), port, batch, max_staleness)
        run = _Ours(
            Path(folder), orchestrator(folder), spawn(_role("paced replica" if paced else "replica", port, seed))
        )
        try:
            return asyncio.run(_with_trainer(workload, run, f"127.0.0.1:{port}"))
        finally:
            kill([run.orchestrator, run.replica])


async def _with_trainer(workload: Any, run: _Ours, address: str) -> Any:
    trainer = ScriptedTrainer(address)
    try:
        async with asyncio.timeout(60):
            await trainer.join()
            await trainer.publish(0)
        return await workload(trainer, run)
    finally:
        await trainer.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Saturated:
    rate: float  # trained sequences per second
    orchestrator_cpu_ms: float  # per trained sequence
    all_cpu_ms: float
    bytes_per_token: float  # of recorded trajectories


class _Throughput:
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    async def __call__(self, trainer: ScriptedTrainer, run: _Ours) -> _Saturated:
        began: list[float] = []
        count, took_s = await trainer.throughput(self._seconds, WARM_UP, lambda: began.extend(_cpu_s(run)))
        used = [end - begin for begin, end in zip(began, _cpu_s(run), strict=True)]
        return _Saturated(
            rate=count / took_s,
            orchestrator_cpu_ms=1000 * used[0] / count,
            all_cpu_ms=1000 * sum(used) / count,
            bytes_per_token=_bytes_per_token(run.run_dir / "journal"),
        )


def _cpu_s(run: _Ours) -> list[float]:
    """Of orchestrator, replica and trainer, which is this process."""
    return [tree_cpu_s(run.orchestrator.pid), tree_cpu_s(run.replica.pid), time.process_time()]


def _bytes_per_token(journal: Path) -> float:
    """Of the present files, while the orchestrator goes on writing."""
    num_bytes = sum(path.stat().st_size for path in journal.iterdir())
    with closing(JournalReader(journal)) as reader:
        num_records = sum(1 for _ in reader.rows_of(entries.TRAJECTORY))
    return num_bytes / (num_records * (NUM_TOKENS + NUM_PROMPT_TOKENS))


async def _paced_grpc(trainer: ScriptedTrainer, num_batches: int) -> list[float]:
    """Seconds from the end of the last rollout of each batch to the arrival of the batch."""
    delays = []
    for step in range(1, num_batches + WARM_UP + 1):
        pulled = await trainer.pull(step)
        delays.append(time.time() - max(item.sequence.metrics[FINISHED_AT] for item in pulled.sequences))
        await trainer.publish(step)
    return delays[WARM_UP:]


async def _latency_grpc(trainer: ScriptedTrainer, gaps: list[float]) -> list[float]:
    delays: list[float] = []
    await trainer.pull(1)
    due = time.perf_counter()
    for step, gap in enumerate(gaps, start=1):
        due += gap
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        await trainer.publish(step)
        await trainer.pull(step + 1)
        delays.append(time.perf_counter() - due)
    return delays


def _write_recipe(folder: Path, port: int, batch: int, max_staleness: int) -> None:
    data = folder / "tasks.jsonl"
    data.write_text("".join(json.dumps({"question": f"question {row}", "answer": row}) + "\n" for row in range(1000)))
    tree = {
        "name": "orchestrator-throughput",
        "run": {"id": "benchmark", "steps": 1_000_000},
        "policies": {"model0": {"model": {"path": "none"}, "batch": {"size": batch, "max_staleness": max_staleness}}},
        "data": {"train": {"path": str(data)}},
        "evaluation": {"at_start": False, "at_end": False},
        "rollout": {"group_size": GROUP_SIZE},
        "orchestrator": {"port": port},
        "inference": {"a": {"engine": "scripted", "port": 0}},
        "envgateway": None,
    }
    save_resolved(validate(tree, source="benchmark"), folder)


async def _run_replica(port: int, seed: int, *, paced: bool = False) -> None:
    rollouts = Rollouts(num_tokens=NUM_TOKENS, seed=seed)
    address = f"127.0.0.1:{port}"
    replica = (
        PacedReplica(address, RATE, seed, num_slots=NUM_PACED_SLOTS, rollouts=rollouts)
        if paced
        else ScriptedReplica(address, num_slots=1024, rollouts=rollouts)
    )
    replica.start()
    await replica.drained.wait()
    await replica.close()


# --- theirs ----------------------------------------------------------------------------------------------------------


def _theirs(workload: Any, batch: int, max_staleness: int, seed: int) -> Any:
    port = free_port()
    hub = spawn([*_role("hub", port, seed)], HUB=f"{batch},{max_staleness}")
    try:
        _wait_for(port)
        workers = spawn(_role("workers", port, seed))
        try:
            return workload(Trainer(port))
        finally:
            kill([workers])
    finally:
        kill([hub])


def _throughput_http(trainer: Trainer, seconds: float) -> float:
    count, begin, step = 0, 0.0, 0
    while not begin or time.perf_counter() - begin < seconds:
        step += 1
        count += len(trainer.pull())
        trainer.publish(step)
        if step == WARM_UP:
            count, begin = 0, time.perf_counter()
    return count / (time.perf_counter() - begin)


def _latency_http(trainer: Trainer, gaps: list[float]) -> list[float]:
    delays: list[float] = []
    trainer.pull()
    due = time.perf_counter()
    for step, gap in enumerate(gaps, start=1):
        due += gap
        time.sleep(max(0.0, due - time.perf_counter()))
        trainer.publish(step)
        trainer.pull()
        delays.append(time.perf_counter() - due)
    return delays


# --- processes -------------------------------------------------------------------------------------------------------


def _role(name: str, port: int, seed: int) -> list[str]:
    return [sys.executable, __file__, "--role", name, "--port", str(port), "--seed", str(seed)]


def _play(role: str, port: int, seed: int) -> None:
    if role in ("replica", "paced replica"):
        asyncio.run(_run_replica(port, seed, paced=role == "paced replica"))
    elif role == "hub":
        batch, max_staleness = map(int, os.environ["HUB"].split(","))
        serve(port, batch, GROUP_SIZE, max_staleness)
    else:
        replica(port, NUM_TOKENS, num_threads=8, seed=seed)


def _wait_for(port: int) -> None:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise TimeoutError(f"no process listens on port {port} after 20 s")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
