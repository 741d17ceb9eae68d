"""Processes that hold games: losses at the death of one."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from extras.worlds.engines import pool as engine_pool
from extras.worlds.engines.pool import EnginePool
from extras.worlds.settings import EnginePoolConfig
from services.common.errors import CapacityError, InvalidRequestError
from services.envgateway.envs.base import EpisodeLostError
from tests.running import is_running
from tests.waiting import until

MODULE = "extras.worlds.tests.toy_engine"
MakePool = Callable[..., EnginePool]


@pytest.fixture
async def make_pool(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[MakePool]:
    pools: list[EnginePool] = []

    def make(num_workers: int = 2, episodes_per_worker: int = 4, step_timeout_s: float = 20.0) -> EnginePool:
        monkeypatch.setattr(engine_pool, "EPISODES_PER_WORKER", episodes_per_worker)
        config = EnginePoolConfig(num_workers=num_workers, step_timeout_s=step_timeout_s)
        pools.append(EnginePool("toy", MODULE, config, {}))
        return pools[-1]

    yield make
    for pool in pools:
        await pool.close()
        assert not any(is_running(pid) for pid in pool.pids)


async def test_no_process_runs_before_the_first_game_and_games_spread_over_processes(make_pool: MakePool) -> None:
    pool = make_pool()
    assert pool.pids == []
    starts = [(await pool.open({}))[1] for _ in range(4)]
    assert len(pool.pids) == 2
    assert sorted(start["pid"] for start in starts) == sorted(pool.pids * 2)


async def test_a_killed_process_loses_its_games_and_no_others(make_pool: MakePool) -> None:
    pool = make_pool()
    games = {}
    for _ in range(2):
        game, start = await pool.open({})
        games[start["pid"]] = game
    victim, other = games
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(EpisodeLostError, match="died"):
        await games[victim].step("add 1")
    with pytest.raises(EpisodeLostError):
        await games[victim].step("add 1")
    assert (await games[other].step("add 2"))["total"] == 2
    _, start = await pool.open({})
    assert start["pid"] not in games and len(pool.pids) == 2
    assert pool.counts["died"] == 1


async def test_a_game_opens_although_its_process_died_while_it_was_idle(make_pool: MakePool) -> None:
    pool = make_pool(num_workers=1)
    game, start = await pool.open({})
    game.close()
    os.kill(start["pid"], signal.SIGKILL)
    game, _ = await pool.open({})
    assert (await game.step("add 3"))["total"] == 3


async def test_a_stalled_game_ends_its_process_group_and_the_place_is_used_again(
    make_pool: MakePool,
) -> None:
    pool = make_pool(num_workers=1, step_timeout_s=1.0)
    game, start = await pool.open({})
    child = (await game.step("child"))["child"]
    assert is_running(child)
    with pytest.raises(EpisodeLostError, match=r"longer than 1 s"):
        await game.step("sleep 30")
    await until(lambda: not is_running(child) and not is_running(start["pid"]))
    game, again = await pool.open({})
    assert again["pid"] != start["pid"]
    assert pool.counts["stalled"] == 1


async def test_waiting_behind_a_slow_game_is_no_stall(make_pool: MakePool) -> None:
    pool = make_pool(num_workers=1, step_timeout_s=2.0)
    games = [(await pool.open({}))[0] for _ in range(3)]
    answers = await asyncio.gather(*(game.step("sleep 0.8") for game in games))  # the last waits longer than a step may
    assert [answer["total"] for answer in answers] == [0, 0, 0]


async def test_a_full_pool_says_when_to_come_back_and_a_closed_game_makes_room(make_pool: MakePool) -> None:
    pool = make_pool(num_workers=2, episodes_per_worker=1)
    game, _ = await pool.open({})
    await pool.open({})
    with pytest.raises(CapacityError) as refusal:
        await pool.open({})
    assert refusal.value.retry_after_s
    game.close()
    game.close()
    await pool.open({})


async def test_a_game_that_does_not_exist_is_the_callers_mistake_and_takes_no_place(make_pool: MakePool) -> None:
    pool = make_pool(num_workers=1, episodes_per_worker=1)
    for _ in range(3):
        with pytest.raises(InvalidRequestError, match="no such game"):
            await pool.open({"absent": True})
    await pool.open({})


@pytest.mark.parametrize("command", ["raise", "eat"])
async def test_an_engine_that_raises_loses_one_game(make_pool: MakePool, command: str) -> None:
    pool = make_pool(num_workers=1)
    first, start = await pool.open({})
    second, _ = await pool.open({})
    with pytest.raises(EpisodeLostError):
        await first.step(command)
    assert (await second.step("add 1"))["total"] == 1
    assert pool.pids == [start["pid"]]


_OWNER = f"""
import asyncio, sys
from extras.worlds.settings import EnginePoolConfig
from extras.worlds.engines import pool as engine_pool
from extras.worlds.engines.pool import EnginePool
from tests.running import is_running

async def main():
    pool = EnginePool("toy", "{MODULE}", EnginePoolConfig(num_workers=1), {{}})
    game, start = await pool.open({{}})
    print(start["pid"], file=sys.stderr, flush=True)
    await game.step("sleep 60")

asyncio.run(main())
"""


def test_an_engine_dies_with_its_owner_even_in_mid_step(repository: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=repository
    )
    assert owner.stderr is not None
    with owner, owner.stderr as told:
        pid = int(told.readline())
        assert is_running(pid)
        owner.kill()
    deadline = time.monotonic() + 20
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_running(pid)
