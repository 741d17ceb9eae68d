"""Computes rewards: from the scores of workflows to the values that groups compare and train.

    outcome -> time-outs and truncation (rollout.on_timeout, on_truncation) -> advantage group
            -> filters -> overlong penalty -> clip((R + bias) * scale) -> statistics

All readers of rewards use this module, so training, curation and evaluation give an unfinished rollout the same reward.
The statistics of a group are of transformed rewards, so a clip that binds changes mean and deviation. They are computed when
the task group completes, over the rewards of the whole advantage group, including untrained members and rollouts without
any token. An infrastructure failure has no reward and enters no statistics. Pure functions of records and settings.

The overlong penalty is on the tokens of a sequence beyond a soft limit (DAPO, arXiv 2503.14476, section 3.4):

    penalty(n) = 0                                       n <= max_tokens - buffer_tokens
                 factor (n - max + buffer) / buffer      in between
                 factor                                  n >= max_tokens

n counts the tokens that the policy wrote, over all turns.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from services.common import finite as finite_numbers
from services.common.config.processes.services import RolloutConfig
from services.common.config.recipe import Recipe
from services.common.config.training.policy import OverlongPenaltyConfig
from services.common.errors import RolloutTimeoutError
from services.common.finite import finite
from services.common.records.types import RolloutFailure, Sequence, StopReason, Trajectory
from services.orchestrator.buffer.experience import AdvantageGroup, Member
from services.orchestrator.state.groups import GroupBy, Outcome, TaskGroup, group_key, sequence_id


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
        value = finite((reward + self.bias) * self.scale)
        return value if self.clip is None else min(max(value, -self.clip), self.clip)

    def clips(self, reward: float) -> bool:
        """Whether the clip changes the value."""
        return self.clip is not None and abs((reward + self.bias) * self.scale) > self.clip


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRules:
    """Reward settings of the recipe, by policy where a policy has its own; other policies use the defaults."""

    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    transforms: Mapping[str, RewardTransform] = field(default_factory=lambda: MappingProxyType({}))
    group_by: Mapping[str, GroupBy] = field(default_factory=lambda: MappingProxyType({}))

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
        """The advantage groups of a complete task group with the rewards that filters judge.

        A rollout that ran out of time has no sequence and hence no known role, so every group of first attempts
        compares its reward.
        """
        timeouts = sum(is_timeout(outcome) for outcome in group.outcomes.values())
        return [self._with_unfinished(found, timeouts) for found in compared_sequences(group, self.group_by)]

    def transformed(self, group: AdvantageGroup) -> tuple[AdvantageGroup, int]:
        """The group with transformed rewards and their statistics, and the number of clipped rewards. Returns
        ``judged`` itself when no reward changes."""
        transform = self.transforms.get(group.policy, RewardTransform())
        rewards = [member.sequence.reward for member in group.members]
        num_clipped = sum(map(transform.clips, [*rewards, *group.silent]))
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
            _marked(rewarded(member, reward), masks and truncated)
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


def is_truncated(sequence: Sequence) -> bool:
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


def _marked(member: Member, masked: bool) -> Member:
    return replace(member, trained=False) if masked else member


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
        rewarded(member, finite(member.sequence.reward - penalty))
        for member, penalty in zip(group.members, penalties, strict=True)
    )
    return with_members(group, shaped), penalties


def advantage_groups(group: TaskGroup, group_by: Mapping[str, GroupBy] = MappingProxyType({})) -> list[AdvantageGroup]:
    """All advantage groups of a complete task group, in the order of their first sequences.

    ``group_by`` has the rule of each policy; a policy without a rule goes by attempt.
    """
    return [stamped(found) for found in compared_sequences(group, group_by)]


def compared_sequences(
    group: TaskGroup, group_by: Mapping[str, GroupBy] = MappingProxyType({})
) -> list[AdvantageGroup]:
    """The same with every sequence's own reward and without statistics: ``stamped`` computes them."""
    if not group.complete:
        raise ValueError(f"task group {group.id} is not complete: slots {group.unresolved} are open")
    members: dict[tuple[str, str, int], list[Member]] = {}
    for trajectory in group.trajectories:
        for position, sequence in enumerate(trajectory.sequences):
            name = sequence_id(group.id, trajectory.index, position)
            key = group_key(sequence, group_by.get(sequence.policy, "attempt"))
            members.setdefault(key, []).append(Member(sequence_id=name, sequence=sequence))
    return [
        AdvantageGroup(
            task_group_id=group.id, policy=policy, role=role, attempt=attempt, members=tuple(found),
            mean=0.0, std=1.0, num_compared=0, group_by=group_by.get(policy, "attempt"), source=group.order.source,
        )
        for (policy, role, attempt), found in members.items()
    ]  # fmt: skip


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
    return first if all(value == first for value in values) else finite_numbers.mean(values)


def statistics(rewards: Iterable[float]) -> tuple[float, float]:
    """Mean and sample standard deviation; a singleton has 1, so that its advantage is 0. Finite for all finite rewards.

    >>> statistics([1.0, 0.0, 0.0, 1.0])
    (0.5, 0.5773502691896257)
    """
    values = list(rewards)
    return (values[0], 1.0) if len(values) == 1 else finite_numbers.mean_and_deviation(values)


def part_of(group: AdvantageGroup, positions: Iterable[int]) -> AdvantageGroup | None:
    """A group of some of the members and, counted on from them, of the silent ones, with statistics of its own; None
    without a member."""
    chosen, size = list(positions), group.size
    members = [group.members[position] for position in chosen if position < size]
    silent = [group.silent[position - size] for position in chosen if position >= size]
    return with_members(replace(group, silent=tuple(silent)), members) if members else None


def with_members(group: AdvantageGroup, found: Iterable[Member]) -> AdvantageGroup:
    """The same group with these members and new statistics."""
    return stamped(replace(group, members=tuple(found)))


def dynamic_sampling(
    groups: Iterable[AdvantageGroup], enabled: bool
) -> tuple[list[AdvantageGroup], list[AdvantageGroup]]:
    """(kept, dropped): groups whose rewards are all equal carry no gradient. Disabled keeps everything."""
    kept: list[AdvantageGroup] = []
    dropped: list[AdvantageGroup] = []
    for group in groups:
        (dropped if enabled and group.rewards_equal else kept).append(group)
    return kept, dropped
