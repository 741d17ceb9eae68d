"""Trainers as processes: killed with -9 and started again, told to leave, refused, on two ranks."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from services.common.system.child import module_command
from services.common.weights.snapshot import DEFAULT_DIRECTORIES
from services.trainer.replay import replay
from tests.integration.trainer_service.conftest import MakeOrchestrator, TrainerProcess
from tests.integration.trainer_service.orchestrating import FakeOrchestrator
from tests.ports import free_port
from tests.running import is_running
from tests.unit.trainer_service.building import POLICY, batch_of, save_model
from tests.waiting import WAIT_S, until, wait_until

pytestmark = pytest.mark.slow

Trainers = Callable[..., TrainerProcess]


async def run_to_the_end(orchestrator: FakeOrchestrator, trainer: TrainerProcess) -> dict[int, str]:
    trainer.start()
    assert await trainer.wait() == 0, trainer.errors
    return orchestrator.ledger


def snapshots_left(orchestrator: FakeOrchestrator) -> list[Path]:
    return [path for directory in DEFAULT_DIRECTORIES for path in directory.glob(f"*{orchestrator.run_id}*")]


async def test_killed_with_9_and_started_again_it_finishes_with_the_same_bits(
    make_orchestrator: MakeOrchestrator, trainers: Trainers, tmp_path: Path
) -> None:
    """Invariants 6 and 8: after two kills every digest is that of an undisturbed run, and replay agrees.

    The trainer has everything that it must restore: a value head, a teacher, and moments and frozen models on the host.
    """
    settings: dict[str, Any] = {
        "trainer": {"offload": ["optimizer", "reference"], "gradient_checkpointing": True},
        "algorithm": {
            "name": "ppo_clip", "advantage": "gae", "gae_lambda": 0.9, "value_head": {"lr": 0.05}, "kl_coefficient": 0.1,
            "distillation": {
                "teacher_model": str(save_model(tmp_path / "teacher", seed=2)), "coefficient": 0.1, "task_coefficient": 1.0,
            },
        },
        "batch": {"dynamic_sampling": False},
    }  # fmt: skip
    untouched = await make_orchestrator(**settings)
    expected = await run_to_the_end(untouched, trainers(untouched))
    assert sorted(expected) == [0, 1, 2, 3, 4, 5, 6]
    assert len(set(expected.values())) == 7

    orchestrator = await make_orchestrator(**settings)
    trainer = trainers(orchestrator)
    trainer.start()
    await orchestrator.until(lambda: orchestrator.newest >= 1, "nothing was trained")  # before the first checkpoint
    await trainer.kill()
    orchestrator.held_step = 4
    trainer.start()
    await orchestrator.until(lambda: 4 in orchestrator.pulls, "step 4 was never asked for")
    await checkpoint_of_step_2(trainer)
    first_address = orchestrator.sources[3]
    await trainer.kill()
    orchestrator.pulls.clear()
    trainer.start()
    await orchestrator.until(lambda: 4 in orchestrator.pulls, "step 4 was never asked for again")
    assert orchestrator.pulls == [3, 4]  # replayed from checkpoint 2
    assert orchestrator.sources[3] != first_address  # offered again: its new address is known
    await orchestrator.release()
    assert await trainer.wait() == 0, trainer.errors
    assert orchestrator.ledger == expected
    assert orchestrator.counters["conflicts"] == 0
    assert orchestrator.joins[-1].recovered_version == 2
    assert snapshots_left(orchestrator) == []

    # The files that such a run leaves: two checkpoints, and an export of the last version.
    names = sorted(path.name for path in (trainer.run_dir / "checkpoints" / POLICY).iterdir())
    assert names == ["step_000004", "step_000006"]
    exported = AutoModelForCausalLM.from_pretrained(trainer.run_dir / "export" / POLICY)
    assert all(torch.isfinite(weight).all() for weight in exported.parameters())
    assert not [name for name, _ in exported.named_parameters() if "value" in name]

    # Offline, from the checkpoint before the step, without any orchestrator.
    for step, begin in ((6, 4), (3, 0)):
        replayed = replay(orchestrator.recipe, trainer.run_dir, POLICY, step, batch_of)
        assert (replayed.from_checkpoint, replayed.digest) == (begin, expected[step])


async def checkpoint_of_step_2(trainer: TrainerProcess) -> None:
    """It is written while the next step is trained."""
    path = trainer.run_dir / "checkpoints" / POLICY / "step_000002"
    await until(path.exists, "the checkpoint of step 2")


async def test_sigterm_leaves_with_a_checkpoint_and_the_next_start_goes_on(
    make_orchestrator: MakeOrchestrator, trainers: Trainers
) -> None:
    orchestrator = await make_orchestrator(trainer={"checkpoint_every": 100, "num_ranks": 2})
    orchestrator.held_step = 4
    trainer = trainers(orchestrator, num_ranks=2)
    trainer.start()
    await orchestrator.until(lambda: 4 in orchestrator.pulls, "step 4 was never asked for")
    trainer.terminate()
    assert await trainer.wait() == 0, trainer.errors
    assert [path.name for path in (trainer.run_dir / "checkpoints" / POLICY).iterdir()] == ["step_000003"]
    assert snapshots_left(orchestrator) == []
    orchestrator.held_step = None
    orchestrator.pulls.clear()
    await run_to_the_end(orchestrator, trainer)
    assert orchestrator.pulls == [4, 5, 6]


async def test_an_unknown_policy_is_refused_with_a_message(
    make_orchestrator: MakeOrchestrator, trainers: Trainers
) -> None:
    orchestrator = await make_orchestrator()
    trainer = trainers(orchestrator, policy="nobody")
    trainer.start()
    assert await trainer.wait() == 2
    assert "no policy 'nobody' in this run; --policy is one of ['model0']" in trainer.errors


LATE_RANK = """
import os, pathlib, time
if "TORCHELASTIC_RUN_ID" in os.environ:
    launcher = os.getppid()
    pathlib.Path(__file__).with_name("rank").write_text(f"{os.getpid()}\\n")
    while os.getppid() == launcher:
        time.sleep(0.001)
"""


def test_a_rank_whose_launcher_dies_before_the_rank_begins_dies_as_well(tmp_path: Path) -> None:
    """Another launcher starts ranks that need its ports and files."""
    (tmp_path / "sitecustomize.py").write_text(LATE_RANK)  # executed before the code of the rank
    arguments = [f"--policy={POLICY}", f"--orchestrator=127.0.0.1:{free_port()}", f"--run-dir={tmp_path}"]
    command = module_command("services.trainer.launch_ranks", "--num-ranks=1", *arguments)
    written = tmp_path / "rank"
    with (tmp_path / "output").open("wb") as output:
        launcher = subprocess.Popen(
            command, stdout=output, stderr=output, env={**os.environ, "PYTHONPATH": str(tmp_path)}
        )
    try:
        wait_until(lambda: written.exists() and written.read_text().endswith("\n"), "the start of the rank")
    finally:
        launcher.kill()
        launcher.wait(WAIT_S)
    rank = int(written.read_text())
    try:
        wait_until(lambda: not is_running(rank), "the end of the rank")
    finally:
        if is_running(rank):
            os.kill(rank, signal.SIGKILL)
