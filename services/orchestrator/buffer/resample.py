"""GRPO-RoC, resampling on correct: of N rollouts of a prompt keep K, so that failures stay varied and successes clean.

Zero-reward rollouts and positive ones keep their shares of the group, rounded half to even, but each kind keeps a
rollout while the group has two of that kind. Positives with the lowest penalty are kept (tool errors, bad format), so
that the policy does not imitate right answers with errors on the way. Source: rStar2-Agent (arXiv 2508.20722), section
on GRPO-RoC.

A pure function of rewards and penalties: the kept rollouts can be computed again at any time, and so can the fate of
each sequence of a group, for its verdict. Independent of tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

from services.common.config.training.policy import ResampleConfig
from services.common.finite import finite
from services.common.records.fates import GroupFate
from services.common.seeds import derived_seed
from services.orchestrator.buffer.experience import AdvantageGroup
from services.orchestrator.buffer.rewards import part_of
from services.orchestrator.journal.records import MemberFate
from services.orchestrator.state.groups import split_sequence_id

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
    rewards: Sequence[float],
    penalties: Sequence[float],
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
    if len(rewards) != len(penalties):
        raise ValueError(f"{len(rewards)} rewards and {len(penalties)} penalties")
    if keep < 1:
        raise ValueError(f"keep is {keep}; it must be 1 or more")
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
        [_penalty(member.sequence.metrics.get(config.penalty, 0.0)) for member in group.members]
        + [0.0] * len(group.silent),
        config.keep,
        positives=config.positives,
        negatives=config.negatives,
        seed=derived_seed(seed, "resample", group.policy, group.role, group.attempt),
    )
    return part_of(group, kept) if kept else None


def _penalty(value: float) -> float:
    """A metric as a penalty: 0 for negative values and for values that are no number."""
    return max(0.0, finite(float(value)))


def _weighted(draw: random.Random, items: Sequence[int], weights: Sequence[float], count: int) -> list[int]:
    """``count`` items without replacement: the largest of u ** (1 / weight) (Efraimidis and Spirakis, 2006)."""
    keys = [draw.random() ** (1 / weight) for weight in weights]
    order = sorted(range(len(items)), key=lambda index: keys[index], reverse=True)
    return [items[index] for index in order[:count]]


def member_fates(
    group: AdvantageGroup, kept: AdvantageGroup | None, outcome: GroupFate, resample: ResampleConfig | None, seed: int
) -> tuple[MemberFate, ...]:
    """``group`` is the played group, ``kept`` its part in the buffer; ``seed`` is that of its task group."""
    chosen: AdvantageGroup | None = group
    if resample is not None and outcome is not GroupFate.EQUAL_REWARDS:
        chosen = resample_group(group, resample, seed)
    resampled = {member.sequence_id for member in chosen.members} if chosen is not None else set()
    buffered = {member.sequence_id for member in kept.members} if kept is not None else set()
    found = []
    for member in group.members:
        _, index, position = split_sequence_id(member.sequence_id)
        if member.sequence_id in buffered:
            fate = GroupFate.KEPT
        elif member.sequence_id not in resampled:
            fate = GroupFate.RESAMPLED_AWAY
        elif not member.trained and outcome is not GroupFate.EQUAL_REWARDS:
            fate = GroupFate.TRUNCATED
        else:  # of a group that was kept, its own age kept this one out
            fate = GroupFate.EXPIRED if outcome is GroupFate.KEPT else outcome
        tokens = member.sequence.num_trained_tokens
        found.append(MemberFate(index=index, position=position, num_tokens=tokens, fate=fate))
    return tuple(found)
