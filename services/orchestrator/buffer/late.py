"""Rules for tokens that are older than a policy may train: ``batch.late`` and ``batch.max_token_age``.

    keep, wait   trained with their true age; masked beyond ``max_token_age``, where that is set
    mask         masked beyond ``max_staleness``
    drop         a sequence whose oldest token is beyond ``max_staleness`` is dropped

All rules also drop a sequence without a trainable token. Its siblings stay, and so do the statistics of the whole
group. A masked token counts as read by the policy: later tokens have the masked one in their context, and it is no
target. Pure; independent of queues and quotas.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from services.common.config.training.policy import BatchConfig
from services.common.records.types import Segment, Sequence
from services.orchestrator.state.groups import AdvantageGroup, Member


@dataclass(frozen=True, slots=True)
class LateRule:
    """Rule of one policy. ``version`` is always the start of the next training step."""

    drops: bool  # by the oldest token
    most: int | None  # age of the oldest token that is trained; None: any

    @classmethod
    def of(cls, config: BatchConfig) -> LateRule:
        if config.late == "drop":
            return cls(True, config.max_staleness)
        return cls(False, config.max_staleness if config.late == "mask" else config.max_token_age)

    def is_too_old(self, sequence: Sequence, version: int) -> bool:
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
        minimum = group.min_version
        if minimum is None or minimum >= oldest:
            return group
        return replace(group, members=tuple(_masked(member, oldest) for member in group.members))


def mask_sequence(sequence: Sequence, trained_from: int) -> Sequence:
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
