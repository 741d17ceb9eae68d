"""Trainers as processes: killed with -9 and started again, told to leave, refused, on two ranks, replayed offline."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from services.cli.run.processes import ForkServer
from services.common.config.loading import save_resolved
from services.common.system.child import module_command
from services.common.weights.snapshot import DEFAULT_DIRECTORIES
from services.trainer.replay import replay
from tests.forked_ranks import ranks_of
from tests.integration.trainer_service.conftest import EXIT_S, MakeOrchestrator, TrainerProcess
from tests.integration.trainer_service.orchestrating import FakeOrchestrator
from tests.ports import free_port
from tests.running import is_running
from tests.unit.trainer_service.building import POLICY, batch_of, recipe, save_model, save_tokenizer
from tests.waiting import WAIT_S, until, wait_until

pytestmark = pytest.mark.slow

Trainers = Callable[..., TrainerProcess]


async def run_to_the_end(orchestrator: FakeOrchestrator, trainer: TrainerProcess) -> dict[int, str]:
    trainer.start()
    assert await trainer.wait() == 0, trainer.errors
    return orchestrator.ledger


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def untouched(
    model: Path, tmp_path_factory: pytest.TempPathFactory, forks: ForkServer
) -> AsyncIterator[FakeOrchestrator]:
    """The orchestrator of a run that went to its end with one trainer, which was not forked as the others are
    (``forks`` imports beside it); read-only."""
    run_dir = tmp_path_factory.mktemp("untouched")
    orchestrator = FakeOrchestrator(recipe(model, run={"id": f"test-{uuid.uuid4().hex[:12]}"}), run_dir)
    await orchestrator.serve()
    trainer = TrainerProcess(orchestrator, run_dir)
    try:
        await run_to_the_end(orchestrator, trainer)
    finally:
        trainer.close()
        await orchestrator.stop_serving()
    yield orchestrator


def snapshots_left(orchestrator: FakeOrchestrator) -> list[Path]:
    return [path for directory in DEFAULT_DIRECTORIES for path in directory.glob(f"*{orchestrator.run_id}*")]


async def test_killed_with_9_and_started_again_it_finishes_with_the_same_bits(
    untouched: FakeOrchestrator, make_orchestrator: MakeOrchestrator, trainers: Trainers
) -> None:
    """Invariants 6 and 8: after two kills every digest is that of an undisturbed run, and replay agrees."""
    expected = untouched.ledger
    assert sorted(expected) == [0, 1, 2, 3, 4, 5, 6]
    assert len(set(expected.values())) == 7

    orchestrator = await make_orchestrator()
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

    # Offline, from the checkpoint before the step, without any orchestrator.
    replayed = replay(orchestrator.recipe, trainer.run_dir, POLICY, 6, batch_of)
    assert replayed.from_checkpoint == 4
    assert replayed.digest == expected[6]
    replayed = replay(orchestrator.recipe, trainer.run_dir, POLICY, 3, batch_of)
    assert replayed.from_checkpoint == 0
    assert replayed.digest == expected[3]


async def killed_before_step_4(orchestrator: FakeOrchestrator, trainer: TrainerProcess) -> None:
    orchestrator.held_step = 4
    trainer.start()
    await orchestrator.until(lambda: 4 in orchestrator.pulls, "step 4 was never asked for")
    await checkpoint_of_step_2(trainer)
    await trainer.kill()
    await orchestrator.release()


async def checkpoint_of_step_2(trainer: TrainerProcess) -> None:
    """It is written while the next step is trained."""
    path = trainer.run_dir / "checkpoints" / POLICY / "step_000002"
    await until(path.exists, "the checkpoint of step 2")


async def test_what_waits_on_the_host_changes_no_bit_and_is_found_again_after_a_kill(
    make_orchestrator: MakeOrchestrator, trainers: Trainers
) -> None:
    """Moments and reference offloaded, activations recomputed, a checkpoint of both kinds of state."""
    ledgers = []
    for trainer_settings in ({}, {"offload": ["optimizer", "reference"], "gradient_checkpointing": True}):
        orchestrator = await make_orchestrator(
            run={"steps": 4}, trainer=trainer_settings, algorithm={"kl_coefficient": 0.1}
        )
        trainer = trainers(orchestrator)
        if trainer_settings:
            await killed_before_step_4(orchestrator, trainer)
        ledgers.append(await run_to_the_end(orchestrator, trainer))
        assert orchestrator.counters["conflicts"] == 0
    assert ledgers[0] == ledgers[1]


async def test_a_value_head_and_what_a_teacher_said_come_back_after_a_kill_bit_for_bit(
    make_orchestrator: MakeOrchestrator, trainers: Trainers, tmp_path: Path
) -> None:
    """Values are of the weights at step start, so a head that was not restored would change every later digest."""
    teacher = save_model(tmp_path / "teacher", seed=2)
    algorithm = {
        "name": "ppo_clip", "advantage": "gae", "gae_lambda": 0.9, "value_head": {"lr": 0.05},
        "distillation": {"teacher_model": str(teacher), "coefficient": 0.1, "task_coefficient": 1.0},
    }  # fmt: skip
    ledgers = []
    for killed in (False, True):
        orchestrator = await make_orchestrator(run={"steps": 4}, algorithm=algorithm, batch={"dynamic_sampling": False})
        trainer = trainers(orchestrator)
        if killed:
            await killed_before_step_4(orchestrator, trainer)
        ledgers.append(await run_to_the_end(orchestrator, trainer))
        assert orchestrator.counters["conflicts"] == 0
    assert ledgers[0] == ledgers[1]
    exported = AutoModelForCausalLM.from_pretrained(trainer.run_dir / "export" / POLICY)
    assert not [name for name, _ in exported.named_parameters() if "value" in name]


async def test_replay_asks_an_orchestrator_and_compares(
    untouched: FakeOrchestrator, forks: ForkServer, tmp_path: Path
) -> None:
    orchestrator = FakeOrchestrator(untouched.recipe, untouched.run_dir)
    orchestrator.ledger = dict(untouched.ledger)
    save_resolved(orchestrator.recipe, orchestrator.run_dir)
    await orchestrator.serve()
    arguments = [f"--run-dir={orchestrator.run_dir}", f"--policy={POLICY}", "--step=5"]
    arguments += [f"--orchestrator={orchestrator.address}", f"--digest={orchestrator.ledger[5]}"]
    output = tmp_path / "replay.out"
    command = module_command("services.trainer.replay", *arguments)
    process = forks.start(command, {**os.environ, "OMP_NUM_THREADS": "1"}, output)
    assert process is not None, "the fork server has ended"
    try:
        code = await asyncio.to_thread(process.wait, EXIT_S)
    finally:
        await orchestrator.stop_serving()
    assert code == 0, output.read_text()
    report = json.loads(output.read_text().splitlines()[-1])
    assert report["equal"] is True
    assert report["from_checkpoint"] == 4
    assert orchestrator.pulls == [5], "the batch was asked for"


@pytest.mark.parametrize("num_ranks", [1, 2])
async def test_sigterm_leaves_with_a_checkpoint_and_the_next_start_goes_on(
    make_orchestrator: MakeOrchestrator, trainers: Trainers, num_ranks: int
) -> None:
    orchestrator = await make_orchestrator(trainer={"checkpoint_every": 100, "num_ranks": num_ranks})
    orchestrator.held_step = 4
    trainer = trainers(orchestrator, num_ranks=num_ranks)
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


async def test_a_checkpoint_of_another_model_is_refused_with_a_message(
    untouched: FakeOrchestrator, make_orchestrator: MakeOrchestrator, trainers: Trainers, tmp_path: Path
) -> None:
    other = await make_orchestrator(save_model(tmp_path / "untied", tied=False), run={"id": untouched.run_id})
    shutil.copytree(untouched.run_dir / "checkpoints", tmp_path / "refused" / "checkpoints")
    refused = trainers(other, run_dir=tmp_path / "refused")
    refused.start()
    assert await refused.wait() == 2
    assert "step_000006 is a checkpoint of another model: causal_lm.lm_head.weight is missing there" in refused.errors


async def test_a_tokenizer_of_another_model_is_refused_with_a_message(
    make_orchestrator: MakeOrchestrator, trainers: Trainers, tmp_path: Path
) -> None:
    model = save_model(tmp_path / "model")
    save_tokenizer(model, vocabulary=40)
    orchestrator = await make_orchestrator(model)
    trainer = trainers(orchestrator)
    trainer.start()
    assert await trainer.wait() == 2
    assert "vocabulary does not match: the tokenizer has 40 tokens" in trainer.errors
    assert orchestrator.ledger == {}


async def test_an_unknown_policy_is_refused_with_a_message(
    make_orchestrator: MakeOrchestrator, trainers: Trainers
) -> None:
    orchestrator = await make_orchestrator()
    trainer = trainers(orchestrator, policy="nobody")
    trainer.start()
    assert await trainer.wait() == 2
    assert "no policy 'nobody' in this run; --policy is one of ['model0']" in trainer.errors


async def test_two_ranks_train_like_one_rank(make_orchestrator: MakeOrchestrator, trainers: Trainers) -> None:
    """Each rank pulls its share of the same batches; the weights agree up to the order of sums."""
    made = []
    for num_ranks in (1, 2):
        orchestrator = await make_orchestrator(run={"steps": 2}, trainer={"num_ranks": num_ranks})
        trainer = trainers(orchestrator, num_ranks=num_ranks)
        await run_to_the_end(orchestrator, trainer)
        made.append(AutoModelForCausalLM.from_pretrained(trainer.run_dir / "export" / POLICY))
        assert sorted(orchestrator.ledger) == [0, 1, 2]
    one, two = (dict(model.named_parameters()) for model in made)
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=1e-4, atol=1e-5)


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


async def test_a_killed_rank_is_reported_by_its_signal_and_all_ranks_resume(
    make_orchestrator: MakeOrchestrator, trainers: Trainers
) -> None:
    orchestrator = await make_orchestrator(run={"steps": 4}, trainer={"num_ranks": 2})
    orchestrator.held_step = 4
    trainer = trainers(orchestrator, num_ranks=2)
    trainer.start()
    await orchestrator.until(lambda: 4 in orchestrator.pulls, "step 4 was never asked for")
    await checkpoint_of_step_2(trainer)
    os.kill(ranks_of(trainer.pid)[1], signal.SIGKILL)
    assert await trainer.wait() == -signal.SIGKILL, trainer.errors
    orchestrator.held_step = None
    orchestrator.pulls.clear()
    await run_to_the_end(orchestrator, trainer)
    assert orchestrator.pulls == [3, 4]
    assert orchestrator.counters["conflicts"] == 0
