"""Measures the cost of TLS and of a token with each call: plain and secured in turn, in one run on one machine.

* *control*: calls of ``StreamReports`` with one report of a real size (2 KiB), 16 at a time, per second, to a real orchestrator whose
  limits are set out of reach.
* *trajectories*: sequences of 1,000 policy tokens (``--tokens``), as in ``orchestrator_throughput.py``, per second from issue to
  pulled batch: a real orchestrator that journals before each acknowledgement, a scripted replica that streams
  trajectories, a scripted trainer that pulls and publishes. Encryption costs by the byte, about a nanosecond for each
  end, so longer sequences (``--tokens``) show more of the cost.

``ratio`` is the lower one of control and trajectories, secured over plain; ``ours`` and ``theirs`` are trajectories
secured and plain. Each is the median over interleaved rounds; ``spread`` half their range.

    python benchmarks/tls_overhead.py [--quick] [--tokens 4000]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks._peers import Rollouts, ScriptedReplica, ScriptedTrainer, report_once
from benchmarks._processes import ROOT, free_port, kill
from benchmarks._report import median_and_spread, report
from benchmarks._weight_versions import POLICY, RUN
from services.cli.keys import Keyring
from services.common.config.loading import save_resolved, validate
from services.common.pb import pool_pb2, pool_pb2_grpc
from services.common.rpc.client import channel
from services.common.security import identity
from services.common.security.keys import VARIABLE, Role
from services.common.system.machine import num_cores

AT_ONCE = 16
BATCH = 256
TOKENS = 1000
MAX_STALENESS = 2
TURN_S = 120.0  # at most; records that are refused would else be waited for without end
WAITING_BATCHES = MAX_STALENESS + 1  # that an orchestrator has made before its turn
_ARMS = ("plain", "secured")

Measured = dict[str, dict[str, list[float]]]  # by quantity, by arm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds: at most a minute")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="policy tokens of a sequence")
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:  # of a process of this benchmark
        asyncio.run(_play(options))
        return
    # Many short rounds: what else the machine does then hits both arms alike.
    rounds, seconds = (12, 0.3) if options.quick else (40, 0.5)
    measured: Measured = {}
    with tempfile.TemporaryDirectory(prefix="rollmill-tls-") as name:
        folder = Path(name)
        keys = Keyring.make(folder / "keys", RUN)
        asyncio.run(_control(keys, folder, rounds, seconds, measured))
        number, turn_s = (5, 0.7) if options.quick else (24, 1.0)
        asyncio.run(_trajectories(options.tokens, keys, folder, number, turn_s, measured))
    found = {quantity: _ratio(arms) for quantity, arms in measured.items()}
    control = found["reports_per_s"]["ratio"]
    trajectories = found["trajectories_per_s"]
    report(
        "tls_overhead",
        trajectories["secured"],
        trajectories["plain"],
        min(control, trajectories["ratio"]),
        trajectories["spread"],
        unit=f"sequences of {options.tokens} tokens per second",
        control_ratio=control,
        trajectory_ratio=trajectories["ratio"],
        wanted_ratio=0.9,
        **found,
        rounds=rounds,
        # Of others too: beyond 1 no core is free to encrypt beside the rest.
        load_per_core_at_end=os.getloadavg()[0] / num_cores(),
    )


def _in_turn(number: int) -> tuple[str, ...]:
    """The other one first each time: a machine that gets slower favours neither."""
    return _ARMS if number % 2 else _ARMS[::-1]


def _note(measured: Measured, quantity: str, arm: str, value: float) -> None:
    measured.setdefault(quantity, {name: [] for name in _ARMS})[arm].append(value)


def _ratio(arms: dict[str, list[float]]) -> dict[str, float]:
    """Medians, the median ratio of neighbouring rounds, and half the range of these."""
    ratios = [secured / plain for plain, secured in zip(arms["plain"], arms["secured"], strict=True)]
    ratio, spread = median_and_spread(ratios)
    return {name: median_and_spread(arms[name])[0] for name in _ARMS} | {"ratio": ratio, "spread": spread}


# --- control ---------------------------------------------------------------------------------------------------------


async def _control(keys: Keyring, folder: Path, rounds: int, seconds: float, found: Measured) -> None:
    """Both servers run all the time, and are measured in turn."""
    with ExitStack() as ended:
        channels = {}
        for arm in _ARMS:
            port, held = free_port(), keys if arm == "secured" else None
            place = folder / f"control-{arm}"
            place.mkdir()
            _write_recipe(place, port)
            process = _spawn("orchestrator", port, held, place)
            ended.callback(kill, [process])
            with identity.used(_holding(held, Role.INFERENCE)):
                channels[arm] = channel(f"127.0.0.1:{port}")
            with identity.used(_holding(held, Role.TRAINER)):
                await _first_version(port)
        joined = []
        for each in channels.values():
            welcome = asyncio.Event()
            joined.append(asyncio.create_task(_stay(pool_pb2_grpc.PoolServiceStub(each), welcome)))
            await asyncio.wait_for(welcome.wait(), 30.0)
        for number in range(-1, rounds):  # the first one warms up
            for arm in _in_turn(number):
                rate = await _calls(pool_pb2_grpc.PoolServiceStub(channels[arm]), seconds)
                if number >= 0:
                    _note(found, "reports_per_s", arm, rate)
        for task in joined:
            task.cancel()
        await asyncio.gather(*joined, return_exceptions=True)
        for each in channels.values():
            await each.close()


async def _first_version(port: int) -> None:
    """A version for replicas to hold; also waits for the server."""
    trainer = ScriptedTrainer(f"127.0.0.1:{port}")
    async with asyncio.timeout(60):
        await trainer.join()
        await trainer.publish(0)
    await trainer.close()


async def _stay(stub: Any, welcome: asyncio.Event) -> None:
    """A member of the pool; its reports count."""
    hello = pool_pb2.JoinPoolRequest(replica_id="a", incarnation="1", num_slots=1)
    async for _ in stub.JoinPool(hello, wait_for_ready=True):
        welcome.set()
        await asyncio.sleep(0.2)  # the server of commands would else keep this process busy


async def _calls(stub: Any, seconds: float) -> float:
    request, end, count = _real_report(), time.perf_counter() + seconds, 0

    async def work() -> None:
        nonlocal count
        while time.perf_counter() < end:
            await report_once(stub, request, timeout_s=5.0)
            count += 1

    await report_once(stub, request, timeout_s=20.0)
    begin = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    return count / (time.perf_counter() - begin)


def _real_report() -> pool_pb2.StreamReportsRequest:
    """A report of a replica with a hundred rollouts."""
    request = pool_pb2.StreamReportsRequest(replica_id="a", incarnation="1", num_generated_tokens=10**9)
    request.held_versions.add(policy=POLICY, number=100, digest="xxh3-128:" + "0" * 32)
    request.running_task_group_ids.extend(f"0123456789abcdef-{number:08d}" for number in range(25))
    for number in range(20):
        request.gauges[f"a_gauge_of_a_replica_{number}"] = number / 7
    for _ in range(16):
        interval = request.emission_intervals.add()
        interval.start.GetCurrentTime()
        interval.end.GetCurrentTime()
    return request


# --- trajectories ----------------------------------------------------------------------------------------------------


async def _trajectories(tokens: int, keys: Keyring, folder: Path, rounds: int, seconds: float, found: Measured) -> None:
    """Sequences per second that a trainer holds. Both orchestrators run all the time, and are measured in turn: one whose
    batches are not pulled stands still at its quota."""
    with ExitStack() as ended:
        trainers = {}
        for arm in _ARMS:
            port, held = free_port(), keys if arm == "secured" else None
            place = folder / f"trajectories-{arm}"
            place.mkdir()
            _write_recipe(place, port, tokens)
            for process in (_spawn("orchestrator", port, held, place), _spawn("replica", port, held, tokens=tokens)):
                ended.callback(kill, [process])
            with identity.used(_holding(held, Role.TRAINER)):
                trainers[arm] = ScriptedTrainer(f"127.0.0.1:{port}")
        for trainer in trainers.values():
            async with asyncio.timeout(60):
                await trainer.join()
                await trainer.publish(0)
        for number in range(-1, rounds):  # the first one warms up
            for arm in _in_turn(number):
                async with asyncio.timeout(TURN_S):
                    count, took_s = await trainers[arm].throughput(seconds, WAITING_BATCHES)
                if number >= 0:
                    _note(found, "trajectories_per_s", arm, count / took_s)
        for trainer in trainers.values():
            await trainer.close()


async def _play(options: argparse.Namespace) -> None:
    identity.configure(Role.INFERENCE)
    rollouts = Rollouts(num_tokens=options.tokens)
    replica = ScriptedReplica(f"127.0.0.1:{options.port}", num_slots=1024, rollouts=rollouts)
    replica.start()
    await replica.drained.wait()
    await replica.close()


def _write_recipe(folder: Path, port: int, tokens: int = TOKENS) -> None:
    data = folder / "tasks.jsonl"
    data.write_text("".join(json.dumps({"question": f"question {row}", "answer": row}) + "\n" for row in range(1000)))
    tree = {
        "name": "tls-overhead",
        "run": {"id": RUN, "steps": 1_000_000},
        "policies": {POLICY: {"model": {"path": "none"}, "batch": {"size": BATCH, "max_staleness": MAX_STALENESS}}},
        "data": {"train": {"path": str(data)}},
        "evaluation": {"at_start": False, "at_end": False},
        "rollout": {"group_size": 8},
        "sampling": {"max_new_tokens": tokens},
        "orchestrator": {"port": port, "min_free_bytes": 0},
        "inference": {"a": {"engine": "scripted", "port": 0}},
        "envgateway": None,
    }
    save_resolved(validate(tree, source="benchmark"), folder)


# --- processes -------------------------------------------------------------------------------------------------------


def _spawn(role: str, port: int, keys: Keyring | None, folder: Path | None = None, tokens: int = 0) -> Any:
    command = [sys.executable, "-m", "services.orchestrator", f"--run-dir={folder}"]
    if role == "replica":
        command = [sys.executable, __file__, f"--role={role}", f"--port={port}", f"--tokens={tokens}"]
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment |= {VARIABLE: str(keys.folder)} if keys is not None else {}
    silent = subprocess.DEVNULL
    return subprocess.Popen(command, env=environment, cwd=ROOT, stdout=silent, stderr=silent)


def _holding(keys: Keyring | None, role: Role) -> identity.Identity | None:
    return identity.load(keys.folder, role) if keys is not None else None


if __name__ == "__main__":
    main()
