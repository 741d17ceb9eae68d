from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.common.config.training import BatchConfig
from services.common.records import Segment
from services.orchestrator.buffer.buffer import (
    AdvantageGroup,
    ExperienceBuffer,
    Expired,
    LateRule,
    mask_sequence,
)
from tests.unit.orchestrator.builders import advantage_groups, complete_group, group, sequence, trajectory


def made(name: str, version: int, size: int = 2) -> AdvantageGroup:
    return advantage_groups(complete_group(name, [float(i) for i in range(size)], version))[0]


def held(
    batch_size: int, max_staleness: int, late: Literal["keep", "mask", "drop"] = "drop", **config: Any
) -> ExperienceBuffer:
    order = config.pop("order", "deadline")
    rule = LateRule.of(BatchConfig(max_staleness=max_staleness, late=late, **config))
    return ExperienceBuffer(batch_size, rule, order)


def spread(name: str, *versions: tuple[int, ...]) -> AdvantageGroup:
    """A group with a member for each tuple: a segment of two tokens of each of its versions."""
    made = group(name, len(versions))
    for index, found in enumerate(versions):
        segments = [Segment.environment([1]), *(Segment.policy([2, 3], [-0.5, -0.25], v) for v in found)]
        played = replace(sequence(float(index)), segments=tuple(segments))
        made.resolve(trajectory(name, index, played, reward=float(index)))
    return advantage_groups(made)[0]


def left_names(expired: list[Expired]) -> list[str]:
    return [member.sequence_id for _, members in expired for member in members]


def names(groups: list[AdvantageGroup]) -> list[str]:
    return [group.task_group_id for group in groups]


def test_the_oldest_version_is_trained_first_and_ties_by_arrival() -> None:
    buffer = held(batch_size=6, max_staleness=9)
    for name, version in [("new", 3), ("old", 1), ("older", 0), ("old2", 1)]:
        buffer.add(made(name, version))
    assert names(buffer.take()[0]) == ["older", "old", "old2"]


def test_what_is_too_old_leaves_eagerly_wherever_it_stands() -> None:
    buffer = held(batch_size=2, max_staleness=1)
    for name, version in [("a", 2), ("b", 0), ("c", 1)]:
        buffer.add(made(name, version))
    assert buffer.advance(1) == []
    assert left_names(buffer.advance(2)) == ["b/0/0", "b/1/0"]
    assert buffer.num_sequences == 4
    taken, old = buffer.add(made("late", 0))
    assert (taken, len(old)) == (None, 2)
    assert names(buffer.take()[0]) == ["c"]


def test_drop_takes_the_members_that_are_too_old_and_leaves_their_siblings_and_the_statistics_of_all() -> None:
    buffer = held(batch_size=2, max_staleness=1)
    buffer.add(spread("g", (0, 1, 2), (1,), (2,)))
    assert buffer.advance(1) == []
    assert left_names(buffer.advance(2)) == ["g/0/0"], "its oldest token decides"
    assert left_names(buffer.advance(3)) == ["g/1/0"]
    assert buffer.num_sequences == 1
    buffer.add(made("young", 3))
    [kept, young], _ = buffer.take()
    assert [m.sequence_id for m in kept.members] == ["g/2/0"]
    assert (kept.mean, kept.std, kept.num_compared) == (1.0, 1.0, 3)
    assert young.num_compared == young.size == 2


@given(
    versions=st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=4), min_size=1, max_size=5),
    version=st.integers(0, 9),
    max_staleness=st.integers(0, 4),
    late=st.sampled_from(["keep", "mask", "drop", "wait"]),
)
def test_of_every_token_it_is_certain_whether_it_is_trained(
    versions: list[list[int]], version: int, max_staleness: int, late: Any
) -> None:
    """Each token is trained, masked or of an expired member, by its own age or (drop) its sequence's; none is lost."""
    whole = spread("g", *(tuple(sorted(found)) for found in versions))
    buffer = held(1, max_staleness, late)
    buffer.add(whole)
    expired = {member.sequence_id for _, members in buffer.advance(version) for member in members}
    taken = buffer.take()[0][0].members if buffer.ready else ()
    assert expired | {m.sequence_id for m in taken} == {m.sequence_id for m in whole.members}
    by_name = {m.sequence_id: m for m in taken}
    for member, found in zip(whole.members, versions, strict=True):
        ages = [version - v for v in found]
        if late in ("keep", "wait") and max_staleness:
            trained = list(found)
        elif late != "mask":  # on-policy training drops, too
            trained = found if max(ages) <= max_staleness else []
        else:
            trained = [v for v in found if version - v <= max_staleness]
        if member.sequence_id in expired:
            assert not trained
            continue
        left = by_name[member.sequence_id]
        assert left.sequence.num_trained_tokens == 2 * len(trained)
        assert left.num_masked_tokens == 2 * (len(found) - len(trained))
        assert np.array_equal(left.sequence.token_ids, member.sequence.token_ids)
        assert mask_sequence(member.sequence, left.trained_from) == left.sequence or not left.num_masked_tokens
