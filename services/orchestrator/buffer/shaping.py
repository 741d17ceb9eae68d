"""Soft overlong punishment: a penalty on the tokens of a sequence beyond a soft limit (DAPO, arXiv 2503.14476, section
3.4).

    penalty(n) = 0                                       n <= max_tokens - buffer_tokens
                 factor (n - max + buffer) / buffer      in between
                 factor                                  n >= max_tokens

n counts the tokens that the policy wrote, over all turns. Pure; independent of quotas and batches.
"""

from __future__ import annotations

from services.common.config.training.policy import OverlongPenaltyConfig
from services.common.finite import finite
from services.orchestrator.state.groups import AdvantageGroup, rewarded, with_members


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
