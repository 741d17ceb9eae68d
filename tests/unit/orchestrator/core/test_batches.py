"""Batches: one for every step, the same for all ranks and after a restart."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import orjson
import pytest

from services.common.errors import (
    DeadlineError,
    InvalidRequestError,
)
from services.orchestrator.progress import progress
from tests.metrics_catalogue import is_documented
from tests.unit.orchestrator.world import World
from tests.waiting import WAIT_S

ENVELOPE = ("time", "kind", "policy", "step")  # of a row of metrics


async def test_batch_is_the_same_when_asked_again_with_other_rank_count(worlds: Callable[..., World]) -> None:
    world = worlds(minibatches=2)
    await world.publish(0)
    world.train()
    for order in await world.orders(world.join()):
        await world.play(order)
    batch = await world.trainer_api.pull_batch("model0", 1, WAIT_S)
    whole = batch.share(0, 1)
    assert not batch.replayed
    await world.crash()
    again = await world.trainer_api.pull_batch("model0", 1, WAIT_S)
    assert again.replayed
    assert again.record == batch.record
    for num_ranks in (1, 2, 3):
        shares = [again.share(rank, num_ranks) for rank in range(num_ranks)]
        assert {share.minibatches for share in shares} == {whole.minibatches}
        found = sorted((s for share in shares for s in share.sequences), key=lambda s: (s.minibatch, s.position))
        for left, right in zip(whole.sequences, found, strict=True):
            for name in ("sequence_id", "minibatch", "position", "group_mean", "group_std", "staleness"):
                assert getattr(left, name) == getattr(right, name)
            for a, b in zip(left.sequence.segments, right.sequence.segments, strict=True):
                assert a.token_ids.tobytes() == b.token_ids.tobytes()
                assert a.logprobs.tobytes() == b.logprobs.tobytes()


async def test_all_ranks_get_one_batch_however_they_ask(worlds: Callable[..., World]) -> None:
    world = worlds()
    await world.publish(0)
    asking = [asyncio.ensure_future(world.trainer_api.pull_batch("model0", 1, 20.0)) for _ in range(3)]
    asking[0].cancel()  # a rank that goes away does not disturb the others
    world.train()
    for order in await world.orders(world.join()):
        await world.play(order)
    batches = await asyncio.gather(*asking[1:])
    assert batches[0].record is batches[1].record
    assert world.core.batches["model0"].newest_step == 1


async def test_a_trained_sequence_is_never_in_a_second_batch(worlds: Callable[..., World]) -> None:
    world = worlds()
    await world.publish(0)
    world.train()
    seen: list[str] = []
    for step in range(1, 4):
        replica = world.join(number=step - 1)
        for order in await world.orders(replica):
            await world.play(order, version=step - 1)
        batch = await world.trainer_api.pull_batch("model0", step, WAIT_S)
        seen += [entry.sequence_id for entry in batch.record.entries]
        await world.crash()
        await world.publish(step)
        world.train()
    assert len(seen) == len(set(seen)) == 24


async def test_a_pull_without_sequences_names_what_it_waited_for(worlds: Callable[..., World]) -> None:
    world = worlds()
    await world.publish(0)
    with pytest.raises(DeadlineError, match=r"model0: batch of step 1 \(8 sequences\) took longer"):
        await world.trainer_api.pull_batch("model0", 1, 0.05)
    with pytest.raises(InvalidRequestError, match="newest recorded batch is that of step 0"):
        await world.trainer_api.pull_batch("model0", 2, 0.05)
    with pytest.raises(InvalidRequestError, match="the run has 3 steps"):
        await world.trainer_api.pull_batch("model0", 4, 0.05)


async def test_a_step_before_which_no_rollout_finished_has_no_mean_reward_of_rollouts(
    worlds: Callable[..., World],
) -> None:
    """Defect 12: the mean of the batch is not put in its place, neither in the metrics nor in the progress."""
    world = worlds()
    replica = world.join()
    await world.publish(0)
    world.train()
    orders = await world.orders(replica)
    assert len(orders) == 4  # two batches
    for order in orders:
        await world.play(order)
    for step in (1, 2):
        await world.trainer_api.pull_batch("model0", step, 1.0)
        await world.publish(step)
        told = progress(world.core).policies[0].metrics.get("rollout_reward_mean")
        assert told == (0.5 if step == 1 else None)
    path = world.run_dir / "metrics" / "orchestrator.jsonl"
    rows = [row for line in path.read_bytes().splitlines() if (row := orjson.loads(line))["kind"] == "training_step"]
    assert [row.get("rollout_reward_mean") for row in rows] == [0.5, None]
    assert [row["batch_reward_mean"] for row in rows] == [0.5, 0.5]
    assert [row["rollouts_finished"] for row in rows] == [16.0, 0.0]
    assert [key for row in rows for key in row if key not in ENVELOPE and not is_documented(key)] == []
