"""The result of a side of the race: chunks of sampled rollouts over time, and the time of the goal. Pure.

A chunk is some rollouts in the order in which they ended: seconds and CPU seconds since version 0 until the last of
them, how many they are, and the sum of their rewards. Rollouts that no batch took count as any other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

WINDOW = 1280  # rollouts, at least, whose mean is compared with the goal
GOAL = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    wall_s: float
    cpu_s: float
    num: int
    reward: float  # sum


def windows(chunks: Sequence[Chunk], window: int = WINDOW) -> Iterator[tuple[Chunk, float]]:
    """The end of each window and its mean reward: the fewest last chunks with at least ``window`` rollouts."""
    held: deque[Chunk] = deque()
    num, reward = 0, 0.0
    for chunk in chunks:
        held.append(chunk)
        num, reward = num + chunk.num, reward + chunk.reward
        while num - held[0].num >= window:
            gone = held.popleft()
            num, reward = num - gone.num, reward - gone.reward
        if num >= window:
            yield chunk, reward / num


def hit(chunks: Sequence[Chunk], goal: float = GOAL, window: int = WINDOW) -> Chunk | None:
    """The chunk with which the mean first reaches the goal; None if never.

    >>> chunks = [Chunk(wall_s=s, cpu_s=2 * s, num=640, reward=640.0 * (s > 1)) for s in range(5)]
    >>> hit(chunks).wall_s
    3
    """
    return next((chunk for chunk, mean in windows(chunks, window) if mean >= goal), None)


def chunked(ended: Sequence[tuple[float, float, float]], size: int) -> list[Chunk]:
    """(wall, CPU, reward) of each rollout, in the order of their ends; an incomplete last chunk is left out."""
    return [
        Chunk(wall_s=part[-1][0], cpu_s=part[-1][1], num=size, reward=sum(reward for _, _, reward in part))
        for part in (ended[begin : begin + size] for begin in range(0, len(ended) - size + 1, size))
    ]
