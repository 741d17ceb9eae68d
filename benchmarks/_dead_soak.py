"""Rollouts that go on while sockets die, and what is counted of them. Shared by the parts of ``dead_sockets.py``."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from services.common.errors import CapacityError, DeadlineError, EpisodeNotFoundError, InfrastructureError

# As a replica does: played again after these. Anything else would be a failure without a retry, and ends the benchmark.
RETRIED = (InfrastructureError, EpisodeNotFoundError, CapacityError, DeadlineError)
PLAYERS = 6
ALIVE_S = 120.0
BETWEEN_DEATHS_S = 0.3  # rollouts play on a whole server


@dataclass(slots=True, kw_only=True)
class Soak:
    zero_rewards: int = 0
    deaths: int = 0
    scored: int = 0
    retried: int = 0


async def soak(
    deaths: int, play: Callable[[int], Awaitable[float]], kills: Sequence[Callable[[], Awaitable[None]]]
) -> Soak:
    """Play rollouts, whose policy always wins, while sockets die ``deaths`` times, in each of the ways of ``kills`` in turn."""
    counted = Soak()
    over, scored = asyncio.Event(), asyncio.Event()

    async def player(first: int) -> None:
        seed = first
        while not over.is_set():
            try:
                reward = await play(seed)
            except RETRIED:
                counted.retried += 1
                await asyncio.sleep(0.05)
                continue  # the same rollout again
            counted.scored += 1
            scored.set()
            counted.zero_rewards += reward == 0.0
            seed += PLAYERS

    players = [asyncio.create_task(player(number)) for number in range(PLAYERS)]
    try:
        for number in range(deaths):
            before = counted.scored
            async with asyncio.timeout(ALIVE_S):  # the last death is over
                while counted.scored < before + PLAYERS:
                    scored.clear()
                    await scored.wait()
            await asyncio.sleep(BETWEEN_DEATHS_S)
            await kills[number % len(kills)]()
            counted.deaths += 1
    finally:
        over.set()
        await asyncio.gather(*players)
    return counted
