"""Chooses the prompts to train on from the rewards of earlier task groups of the same prompt.

- ``accept_all``: every prompt.
- ``filter_solved``: without prompts that are almost always solved (a decaying average of the share of successes).
- ``pass_rate``: prompts whose share of successes over their last groups lies in a band (curriculum by measured difficulty).
- ``greso``: draws prompts with equal rewards less often, the longer that lasts; the chance adapts so that the share of
  such groups stays near a target. Source: GRESO (arXiv 2506.02177).

The curriculum passes over a skipped prompt and keeps its order. All randomness comes from the seed and the position in
the curriculum, and observations are journaled, so a restarted orchestrator continues the sequence. Independent of
replicas; of a task group the curation uses the rewards only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from services.common.config.data import DataConfig
from services.common.telemetry.metrics import StepKey

Kind = Literal["easy", "hard"]


def build_curation(config: DataConfig, seed: int) -> FilterSolved | PassRate | Greso | None:
    """The curation that ``data.curation`` names; None for ``accept_all``."""
    if config.curation == "filter_solved":
        return FilterSolved(seed, solved_reward=config.solved_reward, revisit=config.revisit_solved)
    if config.curation == "pass_rate":
        return PassRate(
            seed,
            band=config.pass_rate,
            num_groups=config.pass_rate_groups,
            solved_reward=config.solved_reward,
            revisit_solved=config.revisit_solved,
            revisit_unsolved=config.revisit_unsolved,
        )
    return Greso(seed) if config.curation == "greso" else None


def accepted_by_chance(probability: float, seed: int, position: int) -> bool:
    """Whether a prompt is accepted; a draw by position, independent of the number of draws before a restart."""
    return probability >= 1.0 or float(np.random.default_rng([seed, position]).random()) < probability


class FilterSolved:
    """Skips a prompt while a decaying average of its share of successes, from 0, is at ``limit`` or above.

    With the defaults a prompt leaves after 29 solved groups in a row (1 - 0.9 ** 29 >= 0.95). A solved prompt is still
    played with the chance ``revisit``, and comes back when it is no longer solved.
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
            return  # every rollout failed: the group has no information about the prompt
        share = sum(reward >= self._solved_reward for reward in rewards) / len(rewards)
        self._average[row] = self._decay * self._average.get(row, 0.0) + (1 - self._decay) * share

    def advanced(self) -> None:
        pass

    def gauges(self) -> dict[str, float]:
        solved = sum(average >= self._limit for average in self._average.values())
        return {StepKey.CURATION_SKIPPED.value: float(self._num_skipped), StepKey.CURATION_SOLVED.value: float(solved)}


class PassRate:
    """Skips a prompt while its share of successes, over its last ``num_groups`` groups, is outside of ``band``.

    A prompt with fewer groups is played. One above or below the band is still played with the chance ``revisit_solved`` or
    ``revisit_unsolved``; its newest groups then count, so it can come back. Groups whose rollouts all failed do not count.
    """

    def __init__(
        self, seed: int, *, band: tuple[float, float], num_groups: int, solved_reward: float = 1.0,
        revisit_solved: float = 0.0, revisit_unsolved: float = 0.0,
    ) -> None:  # fmt: skip
        self._seed = seed
        self._band = band
        self._num_groups = num_groups
        self._solved_reward = solved_reward
        self._revisit: dict[Kind, float] = {"easy": revisit_solved, "hard": revisit_unsolved}
        self._counts: dict[int, list[tuple[int, int]]] = {}  # row -> (successes, rollouts) of its last groups
        self._num_skipped = 0

    def rate(self, row: int) -> float | None:
        """The measured share of successes; None before it is known."""
        counts = self._counts.get(row, ())
        if len(counts) < self._num_groups:
            return None
        return sum(solved for solved, _ in counts) / sum(count for _, count in counts)

    def outside(self, row: int) -> Kind | None:
        """On which side of the band a prompt is; None for one to play."""
        rate = self.rate(row)
        low, high = self._band
        if rate is None or low <= rate <= high:
            return None
        return "hard" if rate < low else "easy"

    def accepts(self, row: int, position: int) -> bool:
        side = self.outside(row)
        accepted = side is None or (
            self._revisit[side] > 0.0 and accepted_by_chance(self._revisit[side], self._seed, position)
        )
        self._num_skipped += not accepted
        return accepted

    def observe(self, row: int, rewards: Sequence[float]) -> None:
        if rewards:
            counts = self._counts.setdefault(row, [])
            counts.append((sum(reward >= self._solved_reward for reward in rewards), len(rewards)))
            del counts[: -self._num_groups]

    def advanced(self) -> None:
        pass

    def gauges(self) -> dict[str, float]:
        sides = Counter(map(self.outside, self._counts))
        return {
            StepKey.CURATION_SKIPPED.value: float(self._num_skipped),
            StepKey.CURATION_SOLVED.value: float(sides["easy"]),
            StepKey.CURATION_UNSOLVED.value: float(sides["hard"]),
        }


@dataclass(slots=True)
class _Streak:
    """Number of consecutive groups of a prompt with equal rewards, and the kind of the last."""

    length: int = 0
    kind: Kind = "hard"


@dataclass(frozen=True, slots=True, kw_only=True)
class GresoSettings:
    """Settings per kind (easy: mean reward above 0.5; hard: the rest)."""

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
        """The chance that a prompt is played."""
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
            StepKey.CURATION_SKIPPED.value: float(self._num_skipped),
            "greso_p_easy": self.p["easy"],
            "greso_p_hard": self.p["hard"],
        }
