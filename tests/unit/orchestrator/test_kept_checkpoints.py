"""A trainer may ask again for recorded batches after the oldest checkpoint that the trainer keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from services.common.checkpoints import CheckpointGauge
from services.orchestrator.progress import progress
from services.orchestrator.trainers import TrainerLeases
from tests.unit.orchestrator.world import World


def leases() -> TrainerLeases:
    return TrainerLeases({"p": None}, lease_s=30.0, clock=lambda: 0.0)


def report(trainers: TrainerLeases, **said: Any) -> None:
    trainers.report("p", "a", **{"training_step": 9, "state": "training", "checkpoint_step": 0, "gauges": {}, **said})


def test_batches_after_the_oldest_kept_checkpoint_are_kept() -> None:
    trainers = leases()
    trainer = trainers.join("p", "a", 1, 6, kept_checkpoint_steps=(6, 4))
    assert (trainer.checkpoint_step, trainer.oldest_checkpoint_step) == (6, 4)
    report(trainers, checkpoint_step=8, kept_checkpoint_steps=(6, 8))
    assert (trainer.checkpoint_step, trainer.oldest_checkpoint_step) == (8, 6)


def test_a_trainer_that_went_back_to_the_initial_model_keeps_everything() -> None:
    trainers = leases()
    trainers.join("p", "a", 1, 6, kept_checkpoint_steps=(4, 6))
    assert trainers.join("p", "b", 1, 0).oldest_checkpoint_step == 0


async def test_damaged_and_failed_checkpoints_are_among_the_counters_of_the_run(worlds: Callable[..., World]) -> None:
    world = worlds()
    assert not {gauge.value for gauge in CheckpointGauge} & progress(world.core).counters.keys()
    world.core.trainers.join("model0", "t", 1, 0)
    world.core.trainers.report(
        "model0", "t", training_step=1, state="training", checkpoint_step=0,
        gauges={CheckpointGauge.DAMAGED: 2.0, CheckpointGauge.FAILED: 0.0},
    )  # fmt: skip
    assert progress(world.core).counters[CheckpointGauge.DAMAGED] == 2
    assert CheckpointGauge.FAILED not in progress(world.core).counters
