"""The ring in virtual time, over the orchestrator's own quota, groups, buffer and late rule: which rollouts are
trained, and at which age.

    quota open, slots free -> task group -> rollouts of drawn lengths -> Experience -> batch -> training step -> version

One replica of many slots samples a constant number of tokens per second and takes each version at once, in the middle
of rollouts; one trainer takes a constant time per step. Only the lengths are random, and come from the seed: the same
case gives the same figures on any machine. Lengths are in tokens. Shared by the scripts of this folder.
"""

from __future__ import annotations

import heapq
import math
import random
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from services.common.config.training import BatchConfig
from services.common.records import (
    TOO_OLD,
    Purpose,
    RolloutFailure,
    Sampling,
    Segment,
    StopReason,
    Task,
    TaskGroupOrder,
    TokenSequence,
    TokenSource,
    Trajectory,
)
from services.orchestrator.buffer.batches import ExperiencePipeline, LateGroups
from services.orchestrator.groups import Outcome, TaskGroup, split_sequence_id

POLICY = "model0"
TOKENS_PER_S = 100.0
Late = Literal["keep", "mask", "wait", "drop"]

_ZEROS = np.zeros(1 << 20, dtype=np.int32), np.zeros(1 << 20, dtype=np.float32)
_PROMPT = Segment.environment([0])

PARETO_ALPHA = 1.6
DISTRIBUTIONS: dict[str, Callable[[random.Random], float]] = {  # of durations, all of mean 1
    "pareto_1.6": lambda rng: rng.paretovariate(PARETO_ALPHA) * (PARETO_ALPHA - 1) / PARETO_ALPHA,
    "lognormal_0.5": lambda rng: math.exp(rng.gauss(-(0.5**2) / 2, 0.5)),
    "lognormal_0.9": lambda rng: math.exp(rng.gauss(-(0.9**2) / 2, 0.9)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    distribution: str
    max_staleness: int
    late: Late
    batch: int = 64
    group_size: int = 8
    num_slots: int = 128
    mean_s: float = 0.9  # of a rollout
    train_s: float = 0.9  # of a step
    warm_up: int = 20  # steps
    window: int = 150  # steps whose rollouts are counted
    seed: int = 7

    @property
    def bound_s(self) -> float:
        """Seconds of a step if neither side ever waited for the other."""
        return max(self.train_s, self.batch * self.mean_s / self.num_slots)

    def config(self) -> BatchConfig:
        return BatchConfig(size=self.batch, max_staleness=self.max_staleness, late=self.late, dynamic_sampling=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """The fate of one rollout, in tokens."""

    length: int  # if it was, or had been, played to its end
    num_sampled: int
    num_trained: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """Of the rollouts that were issued in the window, all of them decided."""

    fates: list[Fate]
    ages: Counter[int]  # trained tokens by age in versions
    step_s: float  # mean of the window's steps

    def figures(self, bound_s: float) -> dict[str, float]:
        """``untrained_share`` is of sampled tokens. ``p_trained_above_p99`` is the trained share of the tokens of rollouts
        that are longer than 99%, and ``length_bias`` compares the mean number of trained tokens of a rollout of which any
        is trained with the mean length of all, both by the length that a cancelled one would have had."""
        lengths = np.array([fate.length for fate in self.fates])
        trained = np.array([fate.num_trained for fate in self.fates])
        sampled = sum(fate.num_sampled for fate in self.fates)
        longest = lengths > np.quantile(lengths, 0.99)
        counts = np.array([self.ages[age] for age in range(max(self.ages) + 1)])
        return {
            "untrained_share": 1.0 - float(trained.sum()) / sampled,
            "p_trained_above_p99": float(trained[longest].sum() / lengths[longest].sum()),
            "length_bias": float(trained[trained > 0].mean() / lengths.mean()),
            "efficiency": bound_s / self.step_s,
            "age_p50": float(np.searchsorted(counts.cumsum(), 0.5 * counts.sum())),
            "age_p99": float(np.searchsorted(counts.cumsum(), 0.99 * counts.sum())),
            "age_max": float(len(counts) - 1),
        }


@dataclass(slots=True)
class _Rollout:
    length: int
    began: float
    counted: bool
    num_sampled: int = 0
    num_trained: int = 0


class Ring:
    """One run of one case. ``run`` may be called once."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._draw = DISTRIBUTIONS[case.distribution]
        self._rng = random.Random(f"{case.distribution}/{case.seed}")
        self._experience = ExperiencePipeline({POLICY: case.config()}, 1_000_000, Counter(), on_closed=self._closed)
        self._late = LateGroups(POLICY, case.config(), self._experience, lambda: self._now)
        self._late.cancel = self._cancel
        self._now = 0.0
        self._events: list[tuple[float, int, str, int]] = []  # (when, tie, task group or "", slot)
        self._num_events = 0
        self._groups: dict[str, TaskGroup] = {}  # with open slots
        self._rollouts: dict[tuple[str, int], _Rollout] = {}
        self._undecided: set[str] = set()  # task groups of the window that may still be trained
        self._num_issued = 0
        self._num_free = case.num_slots
        self._published: list[float] = [0.0]  # when each version came
        self._began: float | None = None  # when the step began that the trainer computes
        self._ages: Counter[int] = Counter()

    def run(self) -> Outcomes:
        """Play until every rollout of the window is decided: a run that is cut would lose its longest ones."""
        case = self._case
        self._experience.advanced(POLICY, 0)
        while self._version < case.warm_up + case.window or self._undecided:
            self._issue()
            self._train()
            self._next_event()
        first, last = self._published[case.warm_up], self._published[case.warm_up + case.window]
        return Outcomes(
            fates=[
                Fate(length=r.length, num_sampled=r.num_sampled, num_trained=r.num_trained)
                for r in self._rollouts.values()
                if r.counted
            ],
            ages=self._ages,
            step_s=(last - first) / case.window,
        )

    @property
    def _version(self) -> int:
        return len(self._published) - 1

    def _at(self, when: float, name: str = "", slot: int = -1) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (when, self._num_events, name, slot))

    # --- events ------------------------------------------------------------------------------------------------------

    def _next_event(self) -> None:
        self._now, _, name, slot = heapq.heappop(self._events)
        if name:
            if (group := self._groups.get(name)) is not None:  # else it was cancelled
                self._finish(group, slot)
        elif self._began is not None and self._now >= self._began + self._case.train_s:
            self._late.step_s, self._began = self._now - self._began, None
            self._published.append(self._now)
            self._experience.advanced(POLICY, self._version)

    def _issue(self) -> None:
        case = self._case
        while self._num_free >= case.group_size and self._experience.admission.open((POLICY,)):
            self._num_issued += 1
            name = f"g{self._num_issued}"
            order = TaskGroupOrder(
                task_group_id=name,
                task=Task(task_id=name, data={}),
                indices=tuple(range(case.group_size)),
                purpose=Purpose.TRAIN,
                sampling=Sampling(),
            )
            group = TaskGroup(order=order, born={POLICY: self._version})
            self._groups[name] = group
            self._experience.issued(group)
            counted = case.warm_up <= self._version < case.warm_up + case.window
            if counted:
                self._undecided.add(name)
            self._num_free -= case.group_size
            for index in order.indices:
                length = max(1, round(self._draw(self._rng) * case.mean_s * TOKENS_PER_S))
                self._rollouts[name, index] = _Rollout(length=length, began=self._now, counted=counted)
                self._at(self._now + length / TOKENS_PER_S, name, index)

    def _finish(self, group: TaskGroup, index: int) -> None:
        rollout = self._rollouts[group.id, index]
        rollout.num_sampled = rollout.length
        sequence = TokenSequence(
            policy=POLICY,
            segments=(_PROMPT, *self._segments(rollout)),
            reward=float(index % 2),
            stop_reason=StopReason.STOP,
        )
        self._resolve(
            group,
            Trajectory(task_group_id=group.id, index=index, sequences=(sequence,), reward=sequence.reward),
        )

    def _segments(self, rollout: _Rollout) -> list[Segment]:
        """A segment for each version that was held meanwhile."""
        first = bisect_right(self._published, rollout.began) - 1
        last = bisect_left(self._published, self._now) - 1
        begun, segments = 0, []
        for version in range(first, max(first, last) + 1):
            end = rollout.length
            if version < last:
                end = min(end, math.ceil((self._published[version + 1] - rollout.began) * TOKENS_PER_S))
            if end > begun:
                count = end - begun
                segments.append(
                    Segment(
                        source=TokenSource.POLICY,
                        token_ids=_ZEROS[0][:count],
                        logprobs=_ZEROS[1][:count],
                        weight_version=version,
                    )
                )
            begun = max(begun, end)
        return segments

    def _resolve(self, group: TaskGroup, outcome: Outcome) -> None:
        group.resolve(outcome)
        self._num_free += 1
        if group.complete:
            del self._groups[group.id]
        self._experience.resolved(group, outcome)

    def _cancel(self, groups: list[TaskGroup]) -> None:
        for group in groups:
            for index in group.unresolved:
                rollout = self._rollouts[group.id, index]
                rollout.num_sampled = min(rollout.length, math.floor((self._now - rollout.began) * TOKENS_PER_S))
                self._resolve(group, RolloutFailure(task_group_id=group.id, index=index, reason=TOO_OLD))

    def _closed(self, task_group_id: str, reason: str) -> None:
        self._undecided.discard(task_group_id)

    # --- training ----------------------------------------------------------------------------------------------------

    def _train(self) -> None:
        if self._began is not None or not self._experience.buffers[POLICY].ready:
            return
        if not self._late.settled():
            left_s = self._late.left_s()
            if left_s is not None:
                self._at(self._now + left_s)  # to look again when the wait is over
                return
            if not self._late.settled():  # what was cancelled is gone at once here
                raise AssertionError("cancelled groups are still there")
        step = self._version + 1
        groups, _ = self._experience.take_batch(POLICY, step)
        self._late.taken()
        self._experience.batch_recorded(groups)
        for group in groups:
            for member in group.members:
                name, index, _ = split_sequence_id(member.sequence_id)
                rollout = self._rollouts[name, index]
                rollout.num_trained = member.sequence.num_trained_tokens
                if rollout.counted:
                    for segment in member.sequence.segments:
                        if segment.is_policy:
                            self._ages[self._version - segment.weight_version] += segment.num_tokens
        self._began = self._now
        self._at(self._now + self._case.train_s)
