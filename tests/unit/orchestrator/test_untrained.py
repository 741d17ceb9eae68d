"""An untrained policy is served with the weights of its checkpoint, without quota, batches and fates."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from services.common.records import TokenSequence
from services.orchestrator.buffer.buffer import mask_sequence
from services.orchestrator.groups import RunState
from services.orchestrator.members import Held, Hello
from services.orchestrator.progress import progress, summary, waits
from tests.unit.orchestrator.builders import sequence
from tests.unit.orchestrator.world import World, living
from tests.waiting import WAIT_S

AB = ("a", "b")


async def test_version_0_is_what_the_first_replica_loaded_and_others_must_hold_the_same(
    worlds: Callable[..., World],
) -> None:
    world = worlds(policies=AB, untrained=("b",))
    await world.publish(0, policy="a")
    world.train()
    assert "run waits for a replica that serves b" in waits(world.core)
    first = world.join("first")
    assert world.core.ledgers["b"].versions[0].digest == "d0"
    other = world.join("other", digests={"b": "d-of-another-model"})
    assert await world.orders(first) and await world.orders(other) == []


async def test_a_group_is_trained_for_one_and_played_by_both(worlds: Callable[..., World]) -> None:
    world = worlds(policies=AB, untrained=("b",), late="drop")
    _, orders = await world.begin()
    assert len(orders) == 4, "the quota of a alone: two batches of 8"
    for order in orders:
        await world.play(order)  # a sequence of each policy
    batch = (await world.pull(1, "a")).share(0, 1)
    assert {item.sequence.policy for item in batch.sequences} == {"a"}
    assert list(world.core.experience.admission.accounts) == ["a"] == list(world.core.batches)
    account = world.core.experience.admission.accounts["a"]
    assert (account.running_slots, account.accepted) == (0, 16)
    assert [policy.policy for policy in progress(world.core).policies] == ["a"]


async def test_its_versions_its_steps_and_its_trainer_hold_nothing_up(worlds: Callable[..., World]) -> None:
    """Under `run.lockstep` too; the run ends when the trained policy has taken its last step."""
    quiet = {"at_start": False, "at_end": False}
    world = worlds(policies=AB, untrained=("b",), run={"lockstep": True}, evaluation=quiet)
    async with living(world) as run:
        replica, orders = await world.begin()
        for step in range(1, world.steps + 1):
            for order in orders:
                await world.play(order)
            await world.pull(step, "a")
            await world.publish(step, policy="a")
            held = {"a": Held(step, f"d{step}"), "b": Held(0, "d0")}
            world.replica_api.report("a", "1", held=held, num_tokens=0, emission=[])
            orders = await world.orders(replica)
        await asyncio.wait_for(run, WAIT_S)
    assert world.core.control.phase is RunState.FINISHED
    assert summary(world.core)["steps"] == {"a": world.steps}


# --- teachers

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
