"""Records with a teacher's scores: refused without them, in the batch with them, and the same after a restart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from services.common.records import TokenSequence
from services.orchestrator.buffer.buffer import mask_sequence
from services.orchestrator.members import Held, Hello
from tests.unit.orchestrator.builders import sequence
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
