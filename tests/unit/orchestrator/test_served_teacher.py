"""Records with a teacher's scores: refused without them, in the batch with them, and the same after a restart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from services.common.records import TokenSequence
from services.orchestrator.buffer.buffer import mask_sequence
from services.orchestrator.ingest import RecordOutcome
from services.orchestrator.members import Held, Hello, Replica
from tests.unit.orchestrator.builders import sequence, trajectory
from tests.unit.orchestrator.world import World

SCORES = -np.linspace(0.5, 7.0, 4, dtype=np.float32)


def taught(worlds: Callable[..., World], **settings: object) -> World:
    return worlds(
        policies=("student", "teacher"),
        untrained=("teacher",),
        algorithm={"name": "reinforce", "distillation": {"teacher": "teacher"}},
        dynamic_sampling=False,
        **settings,
    )


def scored(made: TokenSequence, scores: np.ndarray = SCORES) -> TokenSequence:
    prompt, said = made.segments
    return replace(made, segments=(prompt, replace(said, teacher_logprobs=scores.astype(np.float32))))


async def begin(world: World) -> Replica:
    await world.publish(0, policy="student")
    world.train()
    return world.join()


@pytest.mark.parametrize(
    "made",
    [
        sequence(policy="student"),
        scored(sequence(policy="student"), np.array([-1.0, np.nan, -1.0, -1.0])),
        scored(sequence(policy="student"), np.array([-1.0, -np.inf, -1.0, -1.0])),
    ],
)
async def test_a_record_without_usable_scores_is_a_failure_and_no_reward(
    worlds: Callable[..., World], made: TokenSequence
) -> None:
    world = taught(worlds)
    issued = (await world.orders(await begin(world)))[0]
    assert await world.send(trajectory(issued.task_group_id, 0, made)) == [RecordOutcome.INVALID]
    assert world.core.experience.admission.accounts["student"].num_trajectories == 0


async def test_apart_too_a_student_is_played_only_where_its_teacher_is_served(worlds: Callable[..., World]) -> None:
    world = taught(worlds, rollout={"policies": "apart"})
    await world.publish(0, policy="student")
    world.train()
    hello = Hello(
        replica_id="alone",
        incarnation="1",
        num_slots=64,
        held={"student": Held(0, "d0")},
        running=(),
        weights_address="",
    )
    assert await world.orders(world.replica_api.join(hello)) == []
    orders = await world.orders(world.join("both"))
    assert {order.policies for order in orders} == {("student",)}


def test_tokens_that_are_masked_for_their_age_lose_their_scores() -> None:
    old = scored(sequence(policy="student", version=1))
    masked = mask_sequence(old, 2)
    assert masked.num_trained_tokens == 0 and not len(masked.segments[1].teacher_logprobs)
    assert mask_sequence(old, 1).segments[1].teacher_logprobs.tolist() == SCORES.tolist()
