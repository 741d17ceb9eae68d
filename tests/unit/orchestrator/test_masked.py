"""Samples that machinery leaves without a reward: counted by policy and cause; too large a share pauses the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from services.common.kept_tokens import MaskedCause
from services.common.records import TOO_OLD, RolloutPhase, RolloutTiming
from services.orchestrator import ingest
from services.orchestrator.ingest import MaskedSamples
from tests.unit.orchestrator.builders import failure, trajectory
from tests.unit.orchestrator.world import World


@pytest.fixture(autouse=True)
def small_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingest, "MASKED_WINDOW", 8)


def masked(max_share: float = 0.25) -> tuple[MaskedSamples, Counter[str]]:
    counters: Counter[str] = Counter()
    return MaskedSamples(counters, max_share), counters


def test_samples_are_counted_by_policy_and_cause() -> None:
    samples, counters = masked()
    samples.resolved(("a", "b"), failure(reason="GRADER_FAILED"))
    samples.resolved(("a",), failure(reason="CAPACITY_EXHAUSTED"))
    samples.resolved(("a",), failure(reason=TOO_OLD))
    samples.resolved(("a",), trajectory("g", 0))
    assert counters == {"masked/a/grader_failed": 1, "masked/b/grader_failed": 1, "masked/a/capacity": 1}
    assert samples.share("a") == pytest.approx(2 / 3) and samples.share("nobody") == 0.0


def test_what_was_played_again_is_counted_apart_and_masks_nothing() -> None:
    samples, counters = masked()
    phases = tuple(RolloutPhase(what="retry", begin_s=0.0, seconds=0.1, detail=reason) for reason in
                   ("GRADER_FAILED", "GRADER_FAILED", "EPISODE_NOT_FOUND"))  # fmt: skip
    samples.resolved(("a",), replace(trajectory("g", 0), timing=RolloutTiming(num_retries=3, phases=phases)))
    assert counters == {"redrawn/a/grader_failed": 1, "redrawn/a/episode_lost": 1}
    assert samples.share("a") == 0.0


def test_a_share_above_the_bound_is_said_with_its_cause_once_half_of_the_window_is_there() -> None:
    samples, _ = masked()
    for _ in range(3):
        samples.resolved(("a",), failure(reason="GRADER_FAILED"))
    assert samples.too_many() == ""
    samples.resolved(("a",), failure(reason="INFRASTRUCTURE"))
    told = samples.too_many()
    assert "100% of the newest 4 rollouts of a" in told and "3 grader_failed, 1 infrastructure" in told
    assert "rollout.max_masked_share" in told and MaskedCause.GRADER_FAILED.advice in told
    samples.forget()
    assert samples.too_many() == "" and samples.share("a") == 0.0


async def test_a_run_whose_grader_fails_too_often_pauses_with_the_reason_and_goes_on_when_resumed(
    worlds: Callable[..., World],
) -> None:
    world = worlds(rollout={"max_masked_share": 0.3}, size=16, max_staleness=4)
    parts, watch, replica = world.core, world.watch(), world.join()
    await world.publish(0)
    world.train()

    async def play(*failed: int) -> None:
        for order in (await world.orders(replica))[:1]:
            name = order.task_group_id
            await world.send(*(
                failure(name, i, "GRADER_FAILED") if i in failed else trajectory(name, i, reward=float(i % 2))
                for i in order.indices
            ))  # fmt: skip
        world.clock.now += 2
        await watch.tick()

    await play(0)
    assert not parts.control.paused  # 1 of 4
    await play(2, 3)
    assert parts.control.paused  # 3 of 8
    for part in ("3 grader_failed", "model0", "max_masked_share 0.3", "rollmill resume"):
        assert part in parts.dispatcher.held_back
    assert parts.counters["masked/model0/grader_failed"] == 3 and parts.counters["pauses_for_failures"] == 1
    world.core.resume()
    world.clock.now += 2
    await watch.tick()
    assert not parts.control.paused and "max_masked_share" not in parts.dispatcher.held_back
    await world.crash()
    assert world.core.counters["masked/model0/grader_failed"] in (0, 3)  # as far as the state was written


async def test_a_run_whose_trainer_refuses_its_batch_pauses_with_the_reason_until_it_trains(
    worlds: Callable[..., World],
) -> None:
    world = worlds()
    parts, watch = world.core, world.watch()
    trainer = world.trainer_api.join("model0", "t", 1, 0)
    trainer.refusal = "engine and trainer of model0 disagree by 0.3 nats a token"
    await watch.tick()
    assert parts.control.paused and trainer.refusal in parts.dispatcher.held_back
    assert parts.counters["pauses_for_failures"] == 1, "a launcher without a terminal ends the run"
    for _ in range(2):  # the same batch would be refused again
        world.core.resume()
        for _ in range(2):
            world.clock.now += 2
            await watch.tick()
        assert parts.control.paused
    trainer.refusal = ""
    world.core.resume()
    world.clock.now += 2
    await watch.tick()
    assert not parts.control.paused and "disagree" not in parts.dispatcher.held_back
