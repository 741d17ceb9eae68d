"""Which prompts are worth playing: decided from what earlier task groups of the same prompt brought.

- ``accept_all``: every prompt.
- ``filter_solved``: not those that are solved almost always (a decaying average of the share of successes).
- ``greso``: those whose rewards were all equal lately are drawn less often, the longer that lasts; how much less adapts
  so that the share of such groups stays near a target. Source: GRESO (arXiv 2506.02177).

A skipped prompt is passed over in its curriculum; nothing is reordered. All randomness comes from the seed and the
position in the curriculum, and observations are journaled, so a restarted orchestrator goes on where the earlier one was.
Knows nothing about replicas or task groups beyond their rewards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from services.common.config.data import DataConfig

Kind = Literal["easy", "hard"]


class Curation(Protocol):
    """``accepts`` is asked once per position of the curriculum; ``observe`` is told the rewards of each group."""

    def accepts(self, row: int, position: int) -> bool: ...

    def observe(self, row: int, rewards: Sequence[float]) -> None: ...

    def advanced(self) -> None:
        """A version was published."""
        ...

    def gauges(self) -> dict[str, float]: ...


def build_curation(config: DataConfig, seed: int) -> Curation:
    """By its name in ``data.curation``."""
    if config.curation == "filter_solved":
        return FilterSolved(seed, solved_reward=config.solved_reward, revisit=config.revisit_solved)
    return Greso(seed) if config.curation == "greso" else AcceptAll()


def accepted_by_chance(probability: float, seed: int, position: int) -> bool:
    """Drawn by position, so that the decision does not depend on how many were drawn before a restart."""
    return probability >= 1.0 or float(np.random.default_rng([seed, position]).random()) < probability


class AcceptAll:
    """Every prompt is played."""

    def accepts(self, row: int, position: int) -> bool:
        return True

    def observe(self, row: int, rewards: Sequence[float]) -> None:
        pass

    def advanced(self) -> None:
        pass

    def gauges(self) -> dict[str, float]:
        return {}


class FilterSolved:
    """A prompt is played while a decaying average of its share of successes, from 0, is below ``limit``.

    With the defaults it takes 29 solved groups in a row to leave (1 - 0.9 ** 29 >= 0.95). A solved prompt is played with
    the chance ``revisit`` all the same, and comes back when it is no longer solved.
    """

    def __init__(
        self, seed: int, *, solved_reward: float = 1.0, revisit: float = 0.0, decay: float = 0.9, limit: float = 0.95
    ) -> None:
        self._seed = seed
        self._solved_reward = solved_reward
        self._revisit = revisit
        self._decay = decay
        self._limit = limit
        self._average: dict[int, float] = {}
        self._num_skipped = 0

    def accepts(self, row: int, position: int) -> bool:
        solved = self._average.get(row, 0.0) >= self._limit
        accepted = not solved or (self._revisit > 0.0 and accepted_by_chance(self._revisit, self._seed, position))
        self._num_skipped += not accepted
        return accepted

    def observe(self, row: int, rewards: Sequence[float]) -> None:
        if not rewards:
            return  # every rollout failed: nothing was learnt about the prompt
        share = sum(reward >= self._solved_reward for reward in rewards) / len(rewards)
        self._average[row] = self._decay * self._average.get(row, 0.0) + (1 - self._decay) * share

    def advanced(self) -> None:
        pass

    def gauges(self) -> dict[str, float]:
        solved = sum(average >= self._limit for average in self._average.values())
        return {"curation_skipped": float(self._num_skipped), "curation_solved": float(solved)}


@dataclass(slots=True)
class _Streak:
    """How many groups of a prompt in a row had equal rewards, and of which kind the last was."""

    length: int = 0
    kind: Kind = "hard"


@dataclass(frozen=True, slots=True, kw_only=True)
class GresoSettings:
    """Per kind (easy: mean reward above 0.5; hard: the rest)."""

    start: float = 0.5
    step: float = 0.01  # per version
    lowest: float = 0.01
    highest: float = 0.99
    targets: dict[Kind, float] = field(default_factory=lambda: {"easy": 0.083, "hard": 0.167})
    floors: dict[Kind, float] = field(default_factory=lambda: {"easy": 0.05, "hard": 0.30})


class Greso:
    """A prompt with a streak of z equal-reward groups is played with probability max(p_kind ** z, floor_kind)."""

    def __init__(self, seed: int, settings: GresoSettings | None = None) -> None:
        self._seed = seed
        self._settings = settings or GresoSettings()
        self.p: dict[Kind, float] = {"easy": self._settings.start, "hard": self._settings.start}
        self._streaks: dict[int, _Streak] = {}
        self._seen: Counter[str] = Counter()  # since the last version
        self._num_skipped = 0

    def probability(self, row: int) -> float:
        """With which a prompt is played."""
        streak = self._streaks.get(row)
        if streak is None or streak.length == 0:
            return 1.0
        return max(self.p[streak.kind] ** streak.length, self._settings.floors[streak.kind])

    def accepts(self, row: int, position: int) -> bool:
        accepted = accepted_by_chance(self.probability(row), self._seed, position)
        self._num_skipped += not accepted
        return accepted

    def observe(self, row: int, rewards: Sequence[float]) -> None:
        if len(rewards) < 2:
            return
        self._seen["groups"] += 1
        streak = self._streaks.setdefault(row, _Streak())
        if any(reward != rewards[0] for reward in rewards):
            streak.length = 0
            return
        streak.length += 1
        streak.kind = "easy" if rewards[0] > 0.5 else "hard"
        self._seen[streak.kind] += 1

    def advanced(self) -> None:
        groups = self._seen["groups"]
        if groups:
            for kind, target in self._settings.targets.items():
                # Too many such groups: play fewer prompts that bring them.
                move = -self._settings.step if self._seen[kind] / groups > target else self._settings.step
                self.p[kind] = min(max(self.p[kind] + move, self._settings.lowest), self._settings.highest)
        self._seen.clear()

    def gauges(self) -> dict[str, float]:
        return {
            "curation_skipped": float(self._num_skipped),
            "greso_p_easy": self.p["easy"],
            "greso_p_hard": self.p["hard"],
        }
