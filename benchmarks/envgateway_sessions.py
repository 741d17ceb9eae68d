"""Measures the time that the gateway adds to a turn, with thousands of live episodes.

A gateway process holds 5,000 episodes of the environment `household_toy`. Turns arrive open loop, 200 a second at
random moments (Poisson, by seed), each to the next episode in a shuffled order; an episode that ends is closed and
replaced. Latency counts from the moment a turn was due, so a turn that waits for another is not flattered.

    theirs  the environment's own `step`, called directly in this process, on the same schedule
    ours    StepEpisode over gRPC to the gateway process

Both sides alternate in one run. ``ours`` and ``theirs`` are the medians over the repeats of each side's 99th
percentile, in milliseconds; ``added_p99_ms`` is the median over the repeats of their difference, and may be 5 at most.

    python benchmarks/envgateway_sessions.py [--quick] [--sessions 5000] [--rate 200] [--seconds 15] [--repeats 3]
    [--seed 1]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import orjson

from benchmarks._gateway import gateway
from benchmarks._report import median_and_spread, report

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from services.common.pb import environment_pb2 as pb
from services.common.pb import environment_pb2_grpc as pb_grpc
from services.common.pb import status_pb2, status_pb2_grpc
from services.common.rpc.client import channel
from services.envgateway.envs.household_toy import HouseholdToyEnvironment

LIMIT_MS = 5.0
CREATED_AT_ONCE = 64
TIMEOUT_S = 30.0
SETTINGS = {"max_turns": 10_000}  # random play ends an episode when it happens to solve it


@dataclass(slots=True)
class Session:
    """One episode, at its client."""

    number: int
    episode_id: str = ""
    turn: int = 0
    actions: list[str] | None = None
    environment: HouseholdToyEnvironment | None = None


class Direct:
    """The environment itself."""

    async def begin(self, session: Session) -> None:
        session.environment = HouseholdToyEnvironment(None)  # type: ignore[arg-type]
        start = await session.environment.reset({"index": session.number, "environment": SETTINGS}, 0)
        session.turn, session.actions = 0, list(start.admissible_actions)

    async def step(self, session: Session, action: str) -> bool:
        assert session.environment is not None
        result = await session.environment.step(action)
        session.actions = list(result.admissible_actions)
        return result.done

    async def end(self, session: Session) -> None:
        session.environment = None


class Remote:
    """The same over gRPC."""

    def __init__(self, stub: pb_grpc.EnvironmentServiceAsyncStub) -> None:
        self._stub = stub

    async def begin(self, session: Session) -> None:
        task = orjson.dumps({"index": session.number, "environment": SETTINGS})
        request = pb.CreateEpisodeRequest(environment="household_toy", task_json=task)
        start = await self._stub.CreateEpisode(request, timeout=TIMEOUT_S)
        session.episode_id, session.turn, session.actions = start.episode_id, 0, list(start.admissible_actions)

    async def step(self, session: Session, action: str) -> bool:
        request = pb.StepEpisodeRequest(episode_id=session.episode_id, turn=session.turn, action=action)
        answer = await self._stub.StepEpisode(request, timeout=TIMEOUT_S)
        session.actions = list(answer.admissible_actions)
        return bool(answer.done)

    async def end(self, session: Session) -> None:
        await self._stub.CloseEpisode(pb.CloseEpisodeRequest(episode_id=session.episode_id), timeout=TIMEOUT_S)


Side = Direct | Remote


async def fill(side: Side, sessions: list[Session]) -> float:
    """Begin every session; how many a second."""
    waiting = iter(sessions)

    async def begin_some() -> None:
        for session in waiting:
            await side.begin(session)

    began = time.perf_counter()
    await asyncio.gather(*(begin_some() for _ in range(CREATED_AT_ONCE)))
    return len(sessions) / (time.perf_counter() - began)


async def play(side: Side, sessions: list[Session], rate: float, seconds: float, draw: random.Random) -> list[float]:
    """Turns open loop; the latency of each in milliseconds."""
    order = draw.sample(sessions, len(sessions))
    latencies: list[float] = []
    running: set[asyncio.Task[None]] = set()
    due = time.perf_counter() + 0.1
    end = due + seconds
    number = 0
    while (due := due + draw.expovariate(rate)) < end:
        session = order[number % len(order)]
        number += 1
        assert session.actions is not None
        action = draw.choice(session.actions)
        if (pause := due - time.perf_counter()) > 0:
            await asyncio.sleep(pause)
        task = asyncio.create_task(_turn(side, session, action, due, latencies))
        running.add(task)
        task.add_done_callback(running.discard)
    await asyncio.gather(*running)
    return latencies


async def _turn(side: Side, session: Session, action: str, due: float, latencies: list[float]) -> None:
    session.turn += 1
    done = await side.step(session, action)
    latencies.append((time.perf_counter() - due) * 1e3)
    if done:
        await side.end(session)
        await side.begin(session)


def percentile(values: list[float], share: float) -> float:
    return statistics.quantiles(values, n=1000, method="inclusive")[round(share * 1000) - 1]


async def measure(sessions: int, rate: float, seconds: float, repeats: int, seed: int) -> None:
    draw = random.Random(seed)
    settings = {
        "max_episodes": 2 * sessions,
        "episode_lease_s": 600,
        "sandbox.num_slots": 1,
        "sandbox.allow_tier_0": "true",
        "sandbox.prewarm_scientific": "false",
    }
    async with gateway(settings) as (address, _):
        connection = channel(address)
        remote, direct = Remote(pb_grpc.EnvironmentServiceStub(connection)), Direct()
        far, near = ([Session(number) for number in range(sessions)] for _ in range(2))
        creates_per_s = await fill(remote, far)
        await fill(direct, near)
        ours: list[list[float]] = []
        theirs: list[list[float]] = []
        sides: list[tuple[list[list[float]], Callable[[], Awaitable[list[float]]]]] = [
            (theirs, lambda: play(direct, near, rate, seconds, draw)),
            (ours, lambda: play(remote, far, rate, seconds, draw)),
        ]
        await play(remote, far, rate, 1.0, draw)  # connections, imports, caches
        gc.collect()
        gc.freeze()  # the clients and the worlds that stand beside them: no pause of this process is the gateway's
        for repeat in range(repeats):
            for latencies, run in sides if repeat % 2 else reversed(sides):
                latencies.append(await run())
            print(
                f"repeat {repeat}: direct p99 {percentile(theirs[-1], 0.99):.3f} ms, gateway p50 "
                f"{percentile(ours[-1], 0.5):.3f} p99 {percentile(ours[-1], 0.99):.3f} max {max(ours[-1]):.1f} ms, "
                f"{len(ours[-1]) / seconds:.0f} turns/s"
            )
        status = status_pb2_grpc.StatusServiceStub(connection)
        gauges = (await status.GetStatus(status_pb2.GetStatusRequest(), timeout=TIMEOUT_S)).gauges
        live = gauges["episodes_live"]
        await connection.close()
    added = [percentile(a, 0.99) - percentile(b, 0.99) for a, b in zip(ours, theirs, strict=True)]
    p99, spread = median_and_spread([percentile(values, 0.99) for values in ours])
    plain = statistics.median(percentile(values, 0.99) for values in theirs)
    report(
        "envgateway_sessions",
        p99,
        plain,
        p99 / plain,
        spread,
        added_p99_ms=statistics.median(added),
        added_p99_ms_of_repeats=added,
        limit_ms=LIMIT_MS,
        added_p50_ms=statistics.median(
            percentile(a, 0.5) - percentile(b, 0.5) for a, b in zip(ours, theirs, strict=True)
        ),
        sessions_live=live,
        turns_per_s=statistics.median(len(values) / seconds for values in ours),
        turns=sum(map(len, ours)),
        creates_per_s=creates_per_s,
        seed=seed,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two repeats of 6 s a side: under a minute")
    parser.add_argument("--sessions", type=int, default=5000, help="live episodes")
    parser.add_argument("--rate", type=float, default=200.0, help="turns a second that arrive")
    parser.add_argument("--seconds", type=float, default=15.0, help="length of one side of one repeat")
    parser.add_argument("--repeats", type=int, default=3, help="of both sides")
    parser.add_argument("--seed", type=int, default=1, help="of arrivals and actions")
    arguments = parser.parse_args()
    seconds, repeats = (6.0, 2) if arguments.quick else (arguments.seconds, arguments.repeats)
    asyncio.run(measure(arguments.sessions, arguments.rate, seconds, repeats, arguments.seed))


if __name__ == "__main__":
    main()
