"""Advantage groups of a policy: their rewards, and the buffers in which they wait for a batch or for a replay.

    outcome -> time-outs and truncation (rollout.on_timeout, on_truncation) -> advantage group
            -> filters -> overlong penalty -> clip((R + bias) * scale) -> statistics -> ``ExperienceBuffer``

All readers of rewards use this module, so training, curation and evaluation give an unfinished rollout the same reward.
The statistics of a group are of transformed rewards, so a clip that binds changes mean and deviation. They are computed when
the task group completes, over the rewards of the whole advantage group, including untrained members and rollouts without
any token. An infrastructure failure has no reward and enters no statistics.

The overlong penalty is on the tokens of a sequence beyond a soft limit (DAPO, arXiv 2503.14476, section 3.4):

    penalty(n) = 0                                       n <= max_tokens - buffer_tokens
                 factor (n - max + buffer) / buffer      in between
                 factor                                  n >= max_tokens

n counts the tokens that the policy wrote, over all turns.

GRPO-RoC, resampling on correct: of N rollouts of a prompt keep K, so that failures stay varied and successes clean.
Zero-reward rollouts and positive ones keep their shares of the group, rounded half to even, but each kind keeps a
rollout while the group has two of that kind. Positives with the lowest penalty are kept (tool errors, bad format), so
that the policy does not imitate right answers with errors on the way. Source: rStar2-Agent (arXiv 2508.20722), section
on GRPO-RoC. The kept rollouts can be computed again at any time from rewards, penalties and the seed of the task group.

Independent of grpc, quotas, journals and records of batches.
"""

from __future__ import annotations

import math
import operator
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from statistics import fmean
from types import MappingProxyType
from typing import Literal

from services.common.config.processes import RolloutConfig
from services.common.config.recipe import Recipe
from services.common.config.training import BatchConfig, OverlongPenaltyConfig, ReplayConfig, ResampleConfig
from services.common.errors import RolloutTimeoutError, derived_seed
from services.common.records import RolloutFailure, Segment, StopReason, TokenSequence, Trajectory
from services.orchestrator.admission import Mixture
from services.orchestrator.groups import GroupBy, Outcome, TaskGroup, group_key, sequence_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One sequence of an advantage group."""

    sequence_id: str  # "<task group>/<index>/<position in the trajectory>"
    sequence: TokenSequence  # as trained: masked tokens count as environment tokens
    trained_from: int = 0  # policy tokens of older versions are masked
    num_masked_tokens: int = 0
    trained: bool = True  # False: its reward counts in the statistics, and its tokens are not trained

    @property
    def rollout(self) -> str:
        """The task group and slot of this sequence."""
        return self.sequence_id.rpartition("/")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageGroup:
    """Sequences of one task group that are compared with each other, and their statistics.

    They share policy, role and attempt; with ``group_by: policy`` or ``rollout`` only the policy, and role and attempt
    have no meaning.
    """

    task_group_id: str
    policy: str
    role: str
    attempt: int
    members: tuple[Member, ...]
    mean: float
    std: float  # sample standard deviation (N - 1); 1 for a singleton
    num_compared: int  # rewards that mean and std are of: of rollouts, or of sequences with ``group_by: policy``
    group_by: GroupBy = "attempt"
    silent: tuple[float, ...] = ()  # rewards of rollouts that are compared and left no sequence
    source: str = ""  # of its task
    advantage_scale: float = 1.0  # of that source

    @property
    def size(self) -> int:
        """Number of its sequences."""
        return len(self.members)

    @property
    def min_version(self) -> int | None:
        """Oldest version among its trained tokens; None without trained tokens."""
        versions = [v for m in self.members if (v := m.sequence.min_version) is not None]
        return min(versions) if versions else None

    @property
    def rewards_equal(self) -> bool:
        first = self.members[0].sequence.reward
        return all(m.sequence.reward == first for m in self.members) and all(r == first for r in self.silent)


Expired = tuple[AdvantageGroup, list[Member]]  # a group before, and its members that left the buffer


@dataclass(frozen=True, slots=True)
class LateRule:
    """Rule of one policy for tokens that are older than it may train: ``batch.late`` and ``batch.max_token_age``.

        keep, wait   trained with their true age; masked beyond ``max_token_age``, where that is set
        mask         masked beyond ``max_staleness``
        drop         a sequence whose oldest token is beyond ``max_staleness`` is dropped

    All rules also drop a sequence without a trainable token. Its siblings stay, and so do the statistics of the whole
    group. A masked token counts as read by the policy: later tokens have the masked one in their context, and it is no
    target.

    ``version`` is always the start of the next training step.
    """

    drops: bool  # by the oldest token
    most: int | None  # age of the oldest token that is trained; None: any

    @classmethod
    def of(cls, config: BatchConfig) -> LateRule:
        if config.late_rule == "drop":
            return cls(True, config.max_staleness)
        return cls(False, config.max_staleness if config.late_rule == "mask" else config.max_token_age)

    def is_too_old(self, sequence: TokenSequence, version: int) -> bool:
        """Whether the sequence has policy tokens and none of them may be trained, now or later."""
        if self.most is None:
            return False
        decisive = sequence.min_version if self.drops else sequence.max_version
        return decisive is not None and version - decisive > self.most

    def split(self, group: AdvantageGroup, version: int) -> tuple[AdvantageGroup | None, list[Member]]:
        """The remaining group, with the statistics of the whole group, and the members that are too old."""
        if self.most is None:
            return group, []
        old = [m for m in group.members if self.is_too_old(m.sequence, version)]
        if not old:
            return group, []
        young = tuple(m for m in group.members if not self.is_too_old(m.sequence, version))
        return (replace(group, members=young) if young else None), old

    def masked(self, group: AdvantageGroup, version: int) -> AdvantageGroup:
        """The group as the step from ``version`` trains it."""
        if self.drops or self.most is None or version <= self.most:
            return group
        oldest = version - self.most
        return replace(group, members=tuple(_masked(member, oldest) for member in group.members))


def mask_sequence(sequence: TokenSequence, trained_from: int) -> TokenSequence:
    """The sequence without the policy tokens that versions before ``trained_from`` computed as targets."""
    return replace(
        sequence,
        segments=tuple(
            Segment.environment(s.token_ids) if s.is_policy and s.weight_version < trained_from else s
            for s in sequence.segments
        ),
    )


def _masked(member: Member, trained_from: int) -> Member:
    oldest = member.sequence.min_version
    if oldest is None or oldest >= trained_from:
        return member
    sequence = mask_sequence(member.sequence, trained_from)
    num_masked = member.sequence.num_trained_tokens - sequence.num_trained_tokens
    return replace(
        member,
        sequence=sequence,
        trained_from=trained_from,
        num_masked_tokens=member.num_masked_tokens + num_masked,
    )


class ExperienceBuffer:
    """Groups of one policy that wait for a batch.

    Gives earliest deadline first (oldest version first), ties and ``fifo`` by arrival; ``issued`` by the names of task
    groups, which are counted up. That is the order within a source of tasks; ``Mixture`` chooses among sources. When the
    version advances, members that are too old by the policy's rule leave at once, from any position of the queue.
    """

    def __init__(
        self,
        batch_size: int,
        rule: LateRule,
        order: Literal["deadline", "fifo", "issued"] = "deadline",
        mixture: Mixture | None = None,
        may_come: Callable[[str], bool] = lambda source: False,
    ) -> None:
        """``may_come``: whether another group of a source of the mixture may come without a batch being taken."""
        self.batch_size = batch_size
        self._rule = rule
        self._order = order
        self._mixture = mixture or Mixture()
        self._may_come = may_come
        self._waiting: dict[int, AdvantageGroup] = {}  # by arrival
        self._arrivals = 0
        self.num_of_source: Counter[str] = Counter()  # waiting sequences
        self.version = 0  # the newest published version of the policy

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def num_sequences(self) -> int:
        return self.num_of_source.total()

    @property
    def groups(self) -> tuple[AdvantageGroup, ...]:
        """The waiting groups, in order of arrival."""
        return tuple(self._waiting.values())

    @property
    def ready(self) -> bool:
        """Whether a batch can be taken."""
        enough = self.num_of_source.total() >= self.batch_size
        return enough and (not self._mixture.is_mixed or bool(self._plan()[0]))

    @property
    def lacks(self) -> str:
        """The source that the next batch waits for although there are sequences enough; empty for none."""
        return self._plan()[1]

    def _plan(self) -> tuple[list[int], str]:
        """The groups of the next batch by arrival, in order, and the source that it waits for. The list is empty without a
        batch, and the source too where there are too few sequences of all."""
        if self.num_of_source.total() < self.batch_size:
            return [], ""
        waiting: dict[str, list[tuple[int, int]]] = {source: [] for source in self._mixture.shares}
        for _, arrival in sorted((self._place(group), arrival) for arrival, group in self._waiting.items()):
            group = self._waiting[arrival]
            waiting[group.source].append((len(group.members), arrival))
        return self._mixture.plan(self.batch_size, waiting, self._may_come)

    def add(self, group: AdvantageGroup) -> tuple[AdvantageGroup | None, list[Member]]:
        """Add a group; returns the part that the buffer took, None without one, and the members that are too old
        already."""
        taken, old = self._rule.split(group, self.version)
        if taken is not None:
            self._waiting[self._arrivals] = taken
            self._arrivals += 1
            self.num_of_source[taken.source] += taken.size
        return taken, old

    def _place(self, group: AdvantageGroup) -> tuple[int, str]:
        if self._order == "issued":
            return len(group.task_group_id), group.task_group_id
        if self._order == "fifo":
            return 0, ""
        version = group.min_version
        # A group without trained tokens cannot become too old: its order is that of the newest.
        return self.version if version is None else version, ""

    def advance(self, version: int) -> list[Expired]:
        """Note a version of the trainer; removes and returns members that are too old now, with their groups."""
        self.version = max(self.version, version)
        expired: list[Expired] = []
        for arrival, group in list(self._waiting.items()):
            left, old = self._rule.split(group, self.version)
            if left is None:
                self._remove(arrival)
            elif old:
                self._waiting[arrival] = left
                self.num_of_source[group.source] -= len(old)
            if old:
                expired.append((group, old))
        return expired

    def take(self) -> tuple[list[AdvantageGroup], dict[str, float]]:
        """Whole groups, each source's in order, with at least ``batch_size`` sequences in total, with their too old tokens
        masked; and what the batch's record keeps of a mixture. There must be a batch (``ready``)."""
        plan, lacks = self._plan()
        if not plan:
            raise ValueError(f"no batch of {self.batch_size} can be taken of {self.num_sequences} sequences {lacks}")
        taken = [self._remove(arrival) for arrival in plan]
        sizes: Counter[str] = Counter()
        for group in taken:
            sizes[group.source] += group.size
        return [self._rule.masked(group, self.version) for group in taken], self._mixture.taken(sizes)

    def take_named(self, sequence_ids: Collection[str], *, named: bool = True) -> list[AdvantageGroup]:
        """Remove the groups that a recorded batch names, or (not ``named``) all others."""
        found = [a for a, g in self._waiting.items() if (g.members[0].sequence_id in sequence_ids) is named]
        return [self._remove(arrival) for arrival in found]

    def _remove(self, arrival: int) -> AdvantageGroup:
        group = self._waiting.pop(arrival)
        self.num_of_source[group.source] -= group.size
        return group


class ReplayStore:
    """Trained groups of one policy, bounded, first in, first out.

    A batch draws whole groups at random until the batch is full, none twice. Groups beyond the store's own bound on
    staleness leave when the version advances. Drawn groups stay in the store. The draw depends on ``run.seed``, policy,
    training step and contents alone.
    """

    def __init__(self, policy: str, config: ReplayConfig, seed: int) -> None:
        self._policy = policy
        self._config = config
        self._seed = seed  # of the run
        self.groups: list[AdvantageGroup] = []  # oldest first
        self.version = 0

    def trained(self, groups: Iterable[AdvantageGroup], version: int) -> None:
        """Store groups whose first training step made ``version``."""
        self.version = max(self.version, version)
        least = self.version - self._config.max_staleness
        # A group without trained tokens has no use in a replay.
        self.groups = [g for g in (*self.groups, *groups) if g.min_version is not None and g.min_version >= least]
        left = sum(group.size for group in self.groups)
        while left > self._config.capacity:
            left -= self.groups.pop(0).size

    def draw(self, training_step: int, num_sequences: int) -> list[AdvantageGroup]:
        """Draw groups with at least this many sequences, or all groups."""
        candidates = list(self.groups)
        random.Random(derived_seed(self._seed, "replay", self._policy, training_step)).shuffle(candidates)
        drawn: list[AdvantageGroup] = []
        count = 0
        for group in candidates:
            if count >= num_sequences:
                break
            drawn.append(group)
            count += group.size
        return drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardTransform:
    """clip((R + bias) * scale, -clip, clip); without ``clip`` no clip."""

    bias: float = 0.0
    scale: float = 1.0
    clip: float | None = None

    def __call__(self, reward: float) -> float:
        """
        >>> RewardTransform(bias=-0.5, scale=10.0, clip=4.0)(1.0)
        4.0
        """
        value = (reward + self.bias) * self.scale
        return value if self.clip is None else min(max(value, -self.clip), self.clip)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRules:
    """Reward settings of the recipe, by policy where a policy has its own; other policies use the defaults."""

    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    transforms: Mapping[str, RewardTransform] = field(default_factory=lambda: MappingProxyType({}))
    group_by: Mapping[str, GroupBy] = field(default_factory=lambda: MappingProxyType({}))  # else by attempt

    @classmethod
    def of(cls, recipe: Recipe) -> RewardRules:
        return cls(
            rollout=recipe.rollout,
            transforms={
                name: RewardTransform(
                    bias=policy.algorithm.reward_bias,
                    scale=policy.algorithm.reward_scale,
                    clip=policy.algorithm.reward_clip,
                )
                for name, policy in recipe.policies.items()
            },
            group_by={name: policy.batch.group_by for name, policy in recipe.policies.items()},
        )

    def groups(self, group: TaskGroup) -> list[AdvantageGroup]:
        """The advantage groups of a complete task group with the rewards that filters judge, in the order of their first
        sequences.

        A rollout that ran out of time has no sequence and hence no known role, so every group of first attempts
        compares its reward.
        """
        if not group.complete:
            raise ValueError(f"task group {group.id} is not complete: slots {group.unresolved} are open")
        members: dict[tuple[str, str, int], list[Member]] = {}
        for trajectory in group.trajectories:
            for position, sequence in enumerate(trajectory.sequences):
                name = sequence_id(group.id, trajectory.index, position)
                key = group_key(sequence, self.group_by.get(sequence.policy, "attempt"))
                members.setdefault(key, []).append(Member(sequence_id=name, sequence=sequence))
        timeouts = sum(is_timeout(outcome) for outcome in group.outcomes.values())
        return [
            self._with_unfinished(
                AdvantageGroup(
                    task_group_id=group.id, policy=policy, role=role, attempt=attempt, members=tuple(found), mean=0.0,
                    std=1.0, num_compared=0, group_by=self.group_by.get(policy, "attempt"), source=group.order.source,
                ),
                timeouts,
            )
            for (policy, role, attempt), found in members.items()
        ]  # fmt: skip

    def transformed(self, group: AdvantageGroup) -> tuple[AdvantageGroup, int]:
        """The group with transformed rewards and their statistics, and the number of clipped rewards. Returns
        ``judged`` itself when no reward changes."""
        transform = self.transforms.get(group.policy, RewardTransform())
        rewards = [member.sequence.reward for member in group.members]
        free = replace(transform, clip=None)
        num_clipped = sum(transform(reward) != free(reward) for reward in (*rewards, *group.silent))
        members = tuple(rewarded(m, transform(r)) for m, r in zip(group.members, rewards, strict=True))
        silent = tuple(map(transform, group.silent))
        if group.num_compared and silent == group.silent and all(map(operator.is_, members, group.members)):
            return group, num_clipped
        return stamped(replace(group, members=members, silent=silent)), num_clipped

    def outcome_rewards(self, outcomes: Iterable[Outcome]) -> list[float]:
        """Rewards of the rollouts of one task without failures, for the curation."""
        kept = [outcome for outcome in outcomes if isinstance(outcome, Trajectory) or self._counts_timeout(outcome)]
        return filled([self.outcome_reward(outcome) for outcome in kept])

    def outcome_reward(self, outcome: Outcome) -> float | None:
        """Reward of one rollout; None for a failure and where the settings name no number (``filled`` computes one)."""
        if not isinstance(outcome, Trajectory):
            return self.rollout.timeout_reward if self._counts_timeout(outcome) else None
        penalised = self.rollout.on_truncation == "penalise" and bool(outcome.sequences)
        return self.rollout.truncation_reward if penalised and is_truncated(outcome.sequences[-1]) else outcome.reward

    def _counts_timeout(self, outcome: Outcome) -> bool:
        return is_timeout(outcome) and self.rollout.on_timeout != "as_scored"

    def _with_unfinished(self, group: AdvantageGroup, num_timeouts: int) -> AdvantageGroup:
        """The group with rewards for unfinished rollouts, and marks on the untrained sequences."""
        config = self.rollout
        scores: list[float | None] = [m.sequence.reward for m in group.members]
        cut = [is_truncated(member.sequence) for member in group.members]
        if config.on_truncation == "penalise":
            scores = [config.truncation_reward if c else s for s, c in zip(scores, cut, strict=True)]
        compares = config.on_timeout != "as_scored" and group.attempt == 0
        timeouts = [config.timeout_reward] * (num_timeouts if compares else 0)
        masks = config.on_truncation == "mask"
        members = tuple(
            replace(rewarded(member, reward), trained=member.trained and not (masks and truncated))
            for member, reward, truncated in zip(group.members, filled([*scores, *timeouts]), cut, strict=False)
        )
        # A time-out is compared with rewards of rollouts, where groups compare rollouts.
        group = stamped(replace(group, members=members))
        if not timeouts:
            return group
        rewards = filled([*(member.sequence.reward for member in group.members), *timeouts])
        return stamped(replace(group, silent=tuple(rewards[group.size :])))


def is_timeout(outcome: Outcome) -> bool:
    """Whether the policy alone was slower than ``rollout.timeout_s``."""
    return isinstance(outcome, RolloutFailure) and outcome.reason == RolloutTimeoutError.reason


def is_truncated(sequence: TokenSequence) -> bool:
    """Whether its token budget or the context ran out."""
    return sequence.stop_reason is StopReason.LENGTH


def filled(scores: Iterable[float | None]) -> list[float]:
    """Replaces each missing score with 0, or with the lowest score where that is lower.

    So a rollout without a score never beats one with a score.

    >>> filled([1.0, None]), filled([-3.0, -1.0, None]), filled([None])
    ([1.0, 0.0], [-3.0, -1.0, -3.0], [0.0])
    """
    found = list(scores)
    lowest = min([0.0, *(score for score in found if score is not None)])
    return [lowest if score is None else score for score in found]


def filled_rows(rows: Seq[Seq[float | None]]) -> list[list[float]]:
    """``filled`` over all items of a dataset, each with the scores of its samples."""
    flat = iter(filled(score for row in rows for score in row))
    return [[next(flat) for _ in row] for row in rows]


def without_masked(group: AdvantageGroup) -> AdvantageGroup | None:
    """The trained members, with the statistics of all; None without any."""
    trained = tuple(member for member in group.members if member.trained)
    if len(trained) == group.size:
        return group
    return replace(group, members=trained) if trained else None


def overlong_penalty(num_tokens: int, config: OverlongPenaltyConfig) -> float:
    """Penalty on the reward of a sequence with this many tokens.

    >>> config = OverlongPenaltyConfig(max_tokens=100, buffer_tokens=20)
    >>> [overlong_penalty(n, config) for n in (80, 90, 100, 500)]
    [0.0, 0.5, 1.0, 1.0]
    """
    beyond = num_tokens - (config.max_tokens - config.buffer_tokens)
    return config.factor * min(max(beyond, 0) / config.buffer_tokens, 1.0)


def shape_group(group: AdvantageGroup, config: OverlongPenaltyConfig) -> tuple[AdvantageGroup, list[float]]:
    """The group with the penalties in its rewards and statistics, and the penalty of each member."""
    penalties = [overlong_penalty(member.sequence.num_trained_tokens, config) for member in group.members]
    if not any(penalties):
        return group, penalties
    shaped = (
        rewarded(member, member.sequence.reward - penalty)
        for member, penalty in zip(group.members, penalties, strict=True)
    )
    return with_members(group, shaped), penalties


def stamped(group: AdvantageGroup) -> AdvantageGroup:
    """The group with the statistics of its rewards.

    A rollout counts once, with the mean reward of its sequences in the group, however many threads its agent had; with
    ``group_by: policy`` every sequence counts. With ``group_by: rollout`` that mean becomes the reward of all of them, so
    that a rollout has one advantage.
    """
    if group.group_by == "policy":
        rewards = [member.sequence.reward for member in group.members]
    else:
        by_rollout: dict[str, list[float]] = {}
        for member in group.members:
            by_rollout.setdefault(member.rollout, []).append(member.sequence.reward)
        means = {rollout: _mean(found) for rollout, found in by_rollout.items()}
        rewards = list(means.values())
        if group.group_by == "rollout":
            group = replace(group, members=tuple(rewarded(m, means[m.rollout]) for m in group.members))
    mean, std = statistics([*rewards, *group.silent])
    return replace(group, mean=mean, std=std, num_compared=len(rewards) + len(group.silent))


def rewarded(member: Member, reward: float) -> Member:
    """The same member with another reward."""
    if reward == member.sequence.reward:
        return member
    return replace(member, sequence=replace(member.sequence, reward=reward))


def _mean(values: list[float]) -> float:
    first = values[0]  # exactly, where all are alike
    return first if all(value == first for value in values) else fmean(values)


def statistics(rewards: Iterable[float]) -> tuple[float, float]:
    """Mean and sample standard deviation; a singleton has 1, so that its advantage is 0.

    >>> statistics([1.0, 0.0, 0.0, 1.0])
    (0.5, 0.5773502691896257)
    """
    values = list(rewards)
    if len(values) == 1:
        return values[0], 1.0
    mean = fmean(values)
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def with_members(group: AdvantageGroup, found: Iterable[Member]) -> AdvantageGroup:
    """The same group with these members and new statistics."""
    return stamped(replace(group, members=tuple(found)))


Positives = Literal["lowest", "weighted"]
Negatives = Literal["first", "uniform"]


def quotas(num_negative: int, num_positive: int, keep: int) -> tuple[int, int]:
    """(negatives, positives) to keep of a group that has both.

    >>> quotas(31, 1, 16), quotas(16, 16, 16), quotas(1, 31, 16)
    ((15, 1), (8, 8), (1, 15))
    """
    total = num_negative + num_positive
    if keep >= total:
        return num_negative, num_positive
    # Python's round is half to even, and the shares are exact fractions of small integers.
    negative = max(round(num_negative * keep / total), min(2, num_negative))
    positive = max(round(num_positive * keep / total), min(2, num_positive))
    # Rounding and the minima can add up to one or two more than fit: the larger kind gives way.
    while negative + positive > keep:
        if negative > positive:
            negative -= 1
        else:
            positive -= 1
    while negative + positive < keep:  # two halves rounded to even, or a minimum that the other kind leaves room for
        if negative < num_negative:
            negative += 1
        else:
            positive += 1
    return negative, positive


def resample_on_correct(
    rewards: Seq[float],
    penalties: Seq[float],
    keep: int,
    *,
    positives: Positives = "lowest",
    negatives: Negatives = "first",
    seed: int = 0,
) -> list[int]:
    """Positions to keep, ascending; empty when every reward is equal, because such a group carries no gradient.

    A rollout is positive when its reward is above 0. Ties between penalties go to the earlier rollout. ``weighted`` and
    ``uniform`` draw without replacement from ``seed``: positives with weight 1 / (1 + penalty), negatives alike.

    >>> resample_on_correct([1.0, 0.0, 1.0, 0.0], [0.5, 0.0, 0.1, 0.0], keep=2)
    [1, 2]
    """
    if len(set(rewards)) <= 1:
        return []
    good = [position for position, reward in enumerate(rewards) if reward > 0]
    bad = [position for position, reward in enumerate(rewards) if reward <= 0]
    num_bad, num_good = quotas(len(bad), len(good), keep)
    draw = random.Random(seed)
    if positives == "weighted":
        kept_good = _weighted(draw, good, [1 / (1 + penalties[position]) for position in good], num_good)
    else:
        kept_good = sorted(good, key=lambda position: (penalties[position], position))[:num_good]
    kept_bad = draw.sample(bad, num_bad) if negatives == "uniform" else bad[:num_bad]
    return sorted(kept_good + kept_bad)


def resample_group(group: AdvantageGroup, config: ResampleConfig, seed: int) -> AdvantageGroup | None:
    """The kept part of a group, with statistics over the kept rollouts; None without one. Rollouts without a sequence
    are chosen like the others, after them.

    ``seed`` is that of the task group's order, which is journaled: a recovered orchestrator draws the same, and so does
    another run with the same ``run.seed``.
    """
    kept = resample_on_correct(
        [member.sequence.reward for member in group.members] + list(group.silent),
        [max(0.0, member.sequence.metrics.get("penalty", 0.0)) for member in group.members] + [0.0] * len(group.silent),
        config.keep,
        positives=config.positives,
        negatives=config.negatives,
        seed=derived_seed(seed, "resample", group.policy, group.role, group.attempt),
    )
    members = [group.members[position] for position in kept if position < group.size]
    silent = [group.silent[position - group.size] for position in kept if position >= group.size]
    return with_members(replace(group, silent=tuple(silent)), members) if members else None


def _weighted(draw: random.Random, items: Seq[int], weights: Seq[float], count: int) -> list[int]:
    """``count`` items without replacement: the largest of u ** (1 / weight) (Efraimidis and Spirakis, 2006)."""
    keys = [draw.random() ** (1 / weight) for weight in weights]
    order = sorted(range(len(items)), key=lambda index: keys[index], reverse=True)
    return [items[index] for index in order[:count]]
