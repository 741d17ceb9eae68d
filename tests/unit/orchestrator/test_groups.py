from __future__ import annotations

from collections import Counter

import pytest

from services.common.config.training import BatchConfig
from services.orchestrator.buffer.batches import ExperiencePipeline
from services.orchestrator.buffer.buffer import statistics
from services.orchestrator.groups import TaskGroup
from tests.unit.orchestrator.builders import advantage_groups, complete_group, failure, group, sequence, trajectory


def test_a_group_completes_with_failures_too() -> None:
    made = group(size=2)
    made.resolve(failure(index=1))
    assert not made.complete
    assert made.unresolved == (0,)
    made.resolve(trajectory(index=0, reward=1.0))
    assert made.complete
    (only,) = advantage_groups(made)
    assert (only.size, only.mean, only.std) == (1, 1.0, 1.0)


def test_a_slot_that_is_not_of_the_group_is_refused() -> None:
    with pytest.raises(ValueError, match="no slot 4"):
        group(size=4).resolve(trajectory(index=4))


def retried() -> TaskGroup:
    """Four rollouts of a solver, of which two tried again, each with a checker of the other policy."""
    made = group(size=4)
    for index, (first, second) in enumerate([(1.0, None), (0.0, 1.0), (1.0, None), (0.0, 0.5)]):
        parts = [sequence(first, role="solver"), sequence(float(index == 3), policy="b", role="checker")]
        if second is not None:
            parts.append(sequence(second, role="solver", attempt=1))
        made.resolve(trajectory("g", index, *parts))
    return made


def test_first_tries_and_retries_are_compared_apart_by_default() -> None:
    by_attempt = advantage_groups(retried(), {"model0": "attempt"})
    assert [(g.policy, g.role, g.attempt, g.size, g.mean) for g in by_attempt] == [
        ("model0", "solver", 0, 4, 0.5),
        ("b", "checker", 0, 4, 0.25),
        ("model0", "solver", 1, 2, 0.75),
    ]


def test_grouped_by_policy_everything_of_a_policy_is_compared() -> None:
    mixed, other = advantage_groups(retried(), {"model0": "policy"})
    assert (mixed.policy, mixed.size, mixed.mean) == ("model0", 6, pytest.approx(3.5 / 6))
    assert mixed.std == statistics([1.0, 0.0, 1.0, 1.0, 0.0, 0.5])[1]
    assert [m.sequence_id for m in mixed.members] == ["g/0/0", "g/1/0", "g/1/2", "g/2/0", "g/3/0", "g/3/2"]
    assert (other.policy, other.role, other.size) == ("b", "checker", 4), "each policy has its own rule"


def test_dynamic_sampling_drops_equal_rewards_and_off_is_truly_off() -> None:
    for enabled, kept in ((True, ["b"]), (False, ["a", "b"])):
        config = BatchConfig(size=4, dynamic_sampling=enabled)
        experience = ExperiencePipeline({"model0": config}, 3, Counter())
        for name, rewards in (("a", [1.0, 1.0]), ("b", [1.0, 0.0])):
            made = complete_group(name, rewards)
            outcomes, made.outcomes = list(made.outcomes.values()), {}
            experience.issued(made)
            for outcome in outcomes:
                made.resolve(outcome)
                experience.resolved(made, outcome)
        assert [found.task_group_id for found in experience.buffers["model0"].groups] == kept
