"""What becomes of tokens that are older than a policy may train: ``batch.late`` and ``batch.max_token_age``.

    keep, wait   trained with their true age; masked beyond ``max_token_age``, where that is set
    mask         masked beyond ``max_staleness``
    drop         a sequence whose oldest token is beyond ``max_staleness`` is dropped

Everywhere a sequence of which nothing could be trained is dropped, too. Its siblings stay, and so do the statistics of
the whole group. A masked token is one that the policy read: it is in the context of what follows and is no target.
Pure; knows nothing about queues or quotas.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from services.common.config.policy import BatchConfig
from services.common.types import Segment, Sequence
from services.orchestrator.groups import AdvantageGroup, Member


@dataclass(frozen=True, slots=True)
class LateRule:
    """One policy's rule. ``version`` is everywhere the one that the next training step starts from."""

    drops: bool  # by the oldest token
    most: int | None  # age of the oldest token that is trained; None: any

    @classmethod
    def of(cls, config: BatchConfig) -> LateRule:
        if config.late == "drop":
            return cls(True, config.max_staleness)
        return cls(False, config.max_staleness if config.late == "mask" else config.max_token_age)

    def is_too_old(self, sequence: Sequence, version: int) -> bool:
        """Whether it has policy tokens and none of them may be trained, now or later."""
        if self.most is None:
            return False
        decisive = sequence.min_version if self.drops else sequence.max_version
        return decisive is not None and version - decisive > self.most

    def split(self, group: AdvantageGroup, version: int) -> tuple[AdvantageGroup | None, list[Member]]:
        """What is left of a group, with the statistics of all of it, and the members that are too old."""
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
