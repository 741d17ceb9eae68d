"""Computes the fate of each sequence of an advantage group, for its verdict. Pure."""

from __future__ import annotations

from services.common.config.training.policy import ResampleConfig
from services.common.records.fates import GroupFate
from services.orchestrator.buffer.resample import resample_group
from services.orchestrator.journal.records import MemberFate
from services.orchestrator.state.groups import AdvantageGroup, split_sequence_id


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
