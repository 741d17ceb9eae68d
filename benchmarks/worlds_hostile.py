"""Checks that hostile actions do not crash a world, leak resources, earn a reward, or get another try.

One gateway process per world, played over gRPC by the client of the replicas, eight episodes at a time: actions of
``_hostile_actions`` (malformed, huge, repeated), turns out of order, turns after the end; then episodes of one or two
actions. Per world:

    actions, episodes        played
    crashes                  the gateway, or a process of an engine, ended or stalled
    infrastructure_failures  turns that the replica would play again; in ``careless``, a class that fails at every
                             action, those that are missing
    unearned_rewards         rewards for one of these actions that the world's own verdict does not account for
    refused_turns            turns out of order, which must be refused
    leaked_processes, leaked_fds, leaked_episodes   of the gateway when all is closed, beyond its level after
                             the first tenth
    leaked_mb                resident memory of the gateway and its processes at the end, beyond a third of the way
    leak_bound_mb            a tenth of the actions' own bytes and 2 KiB an episode since then, and 64 MB for caches that
                             fill up and for an allocator that keeps memory: a gateway that keeps actions or episodes is
                             above the bound
    slowest_turn_s           at the client

ALFWorld plays the package's houses made here, WebShop a made catalogue unless ROLLMILL_DATA_ROOT has one; TextWorld
three games, or one. ``agentbench`` is our client against our own task server over ``household_toy``; ``taskserver``
sends that server bodies that are no request.

    python benchmarks/worlds_hostile.py [--quick] [--actions 10000] [--episodes 10000] [--worlds a,b] [--seed 1]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks._bench import ROOT, free_port, gateway, report_facts
from benchmarks._hostile_actions import actions, bodies
from services.common.telemetry.accounts import Component

sys.path.insert(0, str(ROOT))

from services.common.errors import (
    InfrastructureError,
    InvalidRequestError,
    NotFoundError,
    RollmillError,
    StateError,
)
from services.common.pb import status_pb2, status_pb2_grpc
from services.common.records import Task
from services.common.rpc.client import channel
from services.common.telemetry.accounts import TimeAccount
from services.inference.gateway import GatewayClient
from services.inference.workflows.base import Step

MB = 1 << 20
LANES = 8
SLOTS = 2  # of the gateway's sandbox
ALWAYS: Mapping[str, object] = {
    "port": 0, "max_episodes": 4096, "episode_lease_s": 2, "sandbox.num_slots": SLOTS, "sandbox.allow_tier_0": "true",
    "sandbox.prewarm_scientific": "false",
}  # fmt: skip
SLOW = ("webshop_bare", "tool", "single_step", "alfworld", "textworld")  # programs, formulas, engines
TURNS = 12  # of an episode of the first part
CACHES_MB, EPISODE_BYTES = 64, 2048
_JSON = {"Content-Type": "application/json"}  # without it nothing gets past the door


@dataclass(frozen=True, slots=True)
class World:
    """How one is set up: the environment's name and row, and settings of the gateway."""

    environment: str
    row: Mapping[str, Any]
    settings: Mapping[str, object] = field(default_factory=dict)
    fails: bool = False  # every action is to fail
    is_slow: bool = False  # a process starts for an episode
    num_tasks: int = 8


@dataclass(slots=True)
class Seen:
    actions: int = 0
    episodes: int = 0
    crashes: int = 0
    infrastructure_failures: int = 0
    unearned_rewards: int = 0
    refused_turns: int = 0
    sent_bytes: int = 0
    slowest_turn_s: float = 0.0
    first_failures: list[str] = field(default_factory=list)

    def failed(self, what: str) -> None:
        self.infrastructure_failures += 1
        if len(self.first_failures) < 5:
            self.first_failures.append(what[:300])


def worlds(folder: Path, num_games: int) -> dict[str, World]:
    """Those that can be played here; making a game of TextWorld takes seconds."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    port = free_port()
    served = {
        "task_server.port": port,
        "task_server.environments": "{household_toy: {end: 10000}}",
    }
    math = {"question": "2+2", "answer": "4711", "environment": {"reward": "math"}}
    tool = {"question": "2+2", "answer": "4711", "environment": {"reward": "boxed", "max_turns": 1000}}
    own = "environments.{0}"
    known = {
        "household_toy": World("household_toy", {"environment": {"max_turns": 1000}}),
        "single_step": World("single_step", math),
        "tool": World("tool", tool),
        "tools": World("tools", {"environment": {"tools": ["python"]}}),
        "gymnasium": World("maze", {}, {own.format("maze"): "benchmarks._hostile_worlds:Maze"}),
        "careless": World("own", {}, {own.format("own"): "benchmarks._hostile_worlds:Careless"}, fails=True),
        "agentbench": World("bench", {}, {**served, "agentbench.bench.url": f"http://127.0.0.1:{port}/api"}),
        "taskserver": World("", {}, served),
        "webshop": World("webshop", {}, {"webshop.data": _catalogue(folder)}),
        "webshop_bare": World(
            "webshop", {"environment": {"style": "bare", "observation": "url", "max_turns": 1000}},
            {"webshop.data": _catalogue(folder)},
        ),
    }  # fmt: skip
    if find_spec("alfworld") is not None:
        known["alfworld"] = World("alfworld", {}, {"alfworld.data": _houses(folder)}, is_slow=True)
    if find_spec("textworld") is not None:
        known["textworld"] = World("textworld", {}, is_slow=True, num_tasks=num_games)
    return known


def _catalogue(folder: Path) -> Path:
    root = os.environ.get("ROLLMILL_DATA_ROOT")
    if root is not None and (Path(root) / "webshop_made").is_dir():
        return Path(root) / "webshop_made"
    from extras.worlds.made import write_catalogue

    (folder / "shop").mkdir(exist_ok=True)
    write_catalogue(folder / "shop", 60, 1)
    return folder / "shop"


def _houses(folder: Path) -> Path:
    from extras.worlds.made import houses, package_data, write_games

    package = package_data()
    write_games(
        list(houses(8, 1, (package / "alfred.twl2").read_text())),
        (package / "alfred.pddl").read_text(),
        folder / "houses",
    )
    return folder / "houses"


class Play:
    """One world's gateway, and the observations."""

    def __init__(self, world: World, pid: int, address: str, seed: int) -> None:
        self._world = world
        self._pid = pid
        self._client = GatewayClient(TimeAccount(Component("benchmark"), num_lanes=LANES))
        self._client.connect(address)
        self._status = channel(address)
        self._actions = actions(seed)
        self._draw = random.Random(seed)
        self._baseline: tuple[int, int] | None = None
        self._third: tuple[float, int, int] | None = None
        self.seen = Seen()

    @property
    def _is_alive(self) -> bool:
        return Path(f"/proc/{self._pid}").exists()

    async def run(self, num_actions: int, num_episodes: int) -> None:
        """The actions, in episodes of some turns; then the rest of the episodes, of one or two."""
        for upto in (num_actions // 10, num_actions // 3, num_actions):
            await asyncio.gather(*(self._play_until(upto, TURNS) for _ in range(LANES)))
            await self._settle()
            self._look()
        print(f"  {self.seen.actions} actions, {self.seen.episodes} episodes", flush=True)
        await asyncio.gather(*(self._episodes_until(num_episodes) for _ in range(LANES)))
        await self._settle()

    async def report(self) -> dict[str, Any]:
        gauges = await self._gauges()
        died = sum(n for name, n in gauges.items() if name.endswith(("_engine_died", "_engine_stalled")))
        self.seen.crashes += int(died) + (not self._is_alive)
        processes, fds = _held(self._pid)
        assert self._baseline is not None and self._third is not None
        rss, sent, episodes = self._third
        seen = {name: getattr(self.seen, name) for name in self.seen.__slots__ if name != "first_failures"}
        late = (self.seen.sent_bytes - sent) / 10 + (self.seen.episodes - episodes) * EPISODE_BYTES
        return {
            **seen,
            "leaked_processes": max(0, processes - self._baseline[0]),
            "leaked_fds": max(0, fds - self._baseline[1]),
            "leaked_episodes": gauges["episodes_live"],
            "leaked_mb": _rss_mb(self._pid) - rss,
            "leak_bound_mb": CACHES_MB + late / MB,
            "failed_actions": sum(n for name, n in gauges.items() if name.endswith("_failed_actions")),
            "first_failures": self.seen.first_failures,
        }

    async def close(self) -> None:
        await self._client.stop()
        await self._status.close()

    def _look(self) -> None:
        if self._baseline is None:
            self._baseline = _held(self._pid)
        elif self._third is None:
            self._third = (_rss_mb(self._pid), self.seen.sent_bytes, self.seen.episodes)

    async def _play_until(self, num_actions: int, turns: int) -> None:
        while self.seen.actions < num_actions and self._is_alive:
            await self._episode(turns)

    async def _episodes_until(self, num_episodes: int) -> None:
        while self.seen.episodes < num_episodes and self._is_alive:
            await self._episode(self._draw.randint(0, 2))

    async def _episode(self, turns: int) -> None:
        self.seen.episodes += 1
        row = {"index": self._draw.randrange(self._world.num_tasks), **self._world.row}
        try:
            episode = await self._client.create_episode(
                self._world.environment, Task(task_id="0", data=row), self.seen.episodes
            )
        except RollmillError as error:
            self.seen.failed(f"create: {type(error).__name__}: {error.message}")
            return
        try:
            for turn in range(1, turns + 1):
                if not await self._turn(episode.episode_id, turn):
                    break
        finally:
            if self._draw.random() < 0.98 or self._world.is_slow:  # some are left alone: their lease ends them
                await self._client.close(episode.episode_id)

    async def _turn(self, episode_id: str, turn: int) -> bool:
        """Whether the episode goes on."""
        action = next(self._actions)
        self.seen.actions += 1
        self.seen.sent_bytes += len(action)
        if self._draw.random() < 0.02:
            await self._out_of_order(episode_id, turn, action)
        began = time.perf_counter()
        try:
            step = await self._client.step(episode_id, turn, action)
        except RollmillError as error:
            # A lost episode is told once, and as one that is not there to whoever asks again, as this client does.
            if self._world.fails and isinstance(error, InfrastructureError | NotFoundError):
                return False
            self.seen.failed(f"{action[:80]!r}: {type(error).__name__}: {error.message}")
            return False
        finally:
            self.seen.slowest_turn_s = max(self.seen.slowest_turn_s, time.perf_counter() - began)
        if self._world.fails:
            self.seen.failed(f"taken: {action[:80]!r}")
        self.seen.unearned_rewards += not _is_earned(step)
        if step.done:
            await self._out_of_order(episode_id, turn, action)
        return not step.done

    async def _out_of_order(self, episode_id: str, turn: int, action: str) -> None:
        try:
            await self._client.step(episode_id, turn + self._draw.choice([1, 2, 99]), action)
        except (InvalidRequestError, StateError, NotFoundError):
            self.seen.refused_turns += 1
        else:
            self.seen.failed(f"turn {turn} was jumped")

    async def _settle(self) -> None:
        """Wait until abandoned episodes have expired."""
        for _ in range(100):
            if not self._is_alive or (await self._gauges())["episodes_live"] == 0:
                return
            await asyncio.sleep(0.2)

    async def _gauges(self) -> Mapping[str, float]:
        stub = status_pb2_grpc.StatusServiceStub(self._status)
        return dict((await stub.GetStatus(status_pb2.GetStatusRequest(), timeout=30.0)).gauges)


class Bodies(Play):
    """Sends invalid requests to the task server. Any answer but a refusal or an ordinary one is a failure."""

    async def run(self, num_actions: int, num_episodes: int) -> None:
        base = f"http://127.0.0.1:{self._world.settings['task_server.port']}/api"
        async with aiohttp.ClientSession() as session:
            for upto in (num_actions // 10, num_actions // 3, num_actions):
                for path, body in bodies(upto, num_actions - upto):
                    if self.seen.actions >= upto:
                        break
                    await self._post(session, f"{base}/{path}", body)
                await self._settle()
                self._look()

    async def _post(self, session: aiohttp.ClientSession, url: str, body: bytes) -> None:
        self.seen.actions += 1
        self.seen.sent_bytes += len(body)
        began = time.perf_counter()
        try:
            async with session.post(url, data=body, headers=_JSON) as response:
                text = await response.text()
        except aiohttp.ClientError as error:
            self.seen.failed(f"{url} {body[:80]!r}: {type(error).__name__}")
            return
        self.seen.slowest_turn_s = max(self.seen.slowest_turn_s, time.perf_counter() - began)
        self.seen.refused_turns += response.status >= 400
        if response.status >= 500:
            self.seen.failed(f"{url} {body[:80]!r}: {response.status} {text[:80]}")


def _is_earned(step: Step) -> bool:
    """No reward, or one that the world has judged: a won game, a purchase."""
    judged = step.metrics.get("won", 0.0) > 0 or "r_type" in step.metrics
    return step.reward <= 0.0 or (judged and step.done and step.reward <= 1.0)


def _family(pid: int) -> Iterator[int]:
    yield pid
    for thread in Path(f"/proc/{pid}/task").iterdir():
        for child in (thread / "children").read_text().split():
            yield from _family(int(child))


def _held(pid: int) -> tuple[int, int]:
    """Processes of the gateway with itself, and its open files.

    A sandbox slot starts its init process at its first run. So the slots count as started from the beginning; more
    init processes than slots count one by one.
    """
    family = list(_family(pid))
    inits = sum(_is_init(one) for one in family)
    return len(family) - inits + max(inits, SLOTS), len(list(Path(f"/proc/{pid}/fd").iterdir()))


def _is_init(pid: int) -> bool:
    """Whether a process is the first one of a pid namespace inside ours."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("NSpid:"))
    return len(line.split()) > 2 and line.split()[-1] == "1"


def _rss_mb(pid: int) -> float:
    pages = sum(int(Path(f"/proc/{one}/statm").read_text().split()[1]) for one in _family(pid))
    return pages * os.sysconf("SC_PAGE_SIZE") / MB


async def soak(name: str, world: World, num_actions: int, num_episodes: int, seed: int) -> dict[str, Any]:
    async with gateway({**ALWAYS, **world.settings}) as (address, pid):
        play = (Bodies if name == "taskserver" else Play)(world, pid, address, seed)
        began = time.perf_counter()
        await play.run(num_actions, num_episodes)
        result = await play.report()
        await play.close()
    return result | {"seconds": time.perf_counter() - began}


async def measure(
    names: list[str], num_actions: int, num_episodes: int, seed: int, left_out: Mapping[str, str]
) -> None:
    with tempfile.TemporaryDirectory(prefix="worlds_hostile") as where:
        folder = Path(where)
        known = worlds(folder, num_games=3 if num_actions > 1000 else 1)
        results = {}
        absent = {name: "not installed here" for name in names or SLOW if name not in known}
        left_out = {**left_out, **absent}
        print("".join(f"{name} is left out: {why}\n" for name, why in left_out.items()), end="")
        for name in (name for name in names or known if name not in left_out):
            print(name, flush=True)
            results[name] = await soak(name, known[name], num_actions, num_episodes, seed)
            print(f"  {results[name]}", flush=True)
    facts = (
        "crashes",
        "infrastructure_failures",
        "unearned_rewards",
        "leaked_processes",
        "leaked_fds",
        "leaked_episodes",
    )
    totals = {fact: sum(result[fact] for result in results.values()) for fact in facts}
    leaking = [name for name, result in results.items() if result["leaked_mb"] > result["leak_bound_mb"]]
    report_facts("worlds_hostile", **totals, leaking=leaking, worlds=results, seed=seed, left_out=left_out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a hundred actions and sixty episodes of most")
    parser.add_argument("--actions", type=int, default=10_000, help="of each world")
    parser.add_argument("--episodes", type=int, default=10_000, help="of each world")
    parser.add_argument("--worlds", default="", help="names, separated by commas; left out, all")
    parser.add_argument("--seed", type=int, default=1, help="of the actions")
    arguments = parser.parse_args()
    num_actions, num_episodes = (100, 60) if arguments.quick else (arguments.actions, arguments.episodes)
    names = [name for name in arguments.worlds.split(",") if name]
    left_out = dict.fromkeys(SLOW, "--quick; name it in --worlds") if arguments.quick and not names else {}
    asyncio.run(measure(names, num_actions, num_episodes, arguments.seed, left_out))


if __name__ == "__main__":
    main()
