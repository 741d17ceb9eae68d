"""Checkpoints of several ranks: any number of ranks reads the checkpoint of any other number, bit for bit, and all go
back together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.cli.run.processes import ForkServer
from services.trainer.ranks import Ranks
from tests.integration.trainer.checkpoint_cases import checkpoints, digests, make, train
from tests.integration.trainer.launching import fork_ranks, made_once, run_processes

pytestmark = pytest.mark.slow

ALONE = Ranks.single()
CASES = "tests.integration.trainer.checkpoint_cases"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written by one rank, read and written by two, read and written by three."""

    def work(directory: Path) -> None:
        step = make(ALONE)
        train(step, ALONE, 1)
        checkpoints(directory / "one", ALONE).save(1, step.model, step.optimizer)
        (directory / "one.json").write_text(json.dumps(digests(step)))
        forks = ForkServer(directory / "forks.stderr", [CASES])
        try:
            for what, num_ranks in (("write", 2), ("read", 3)):
                logs = directory / f"{what}_logs"
                run_processes(fork_ranks(forks, CASES, [str(directory), what], num_ranks, logs), logs)
        finally:
            forks.stop()

    return made_once(tmp_path_factory, "checkpoints_of_ranks", work)


def seen(written: Path, what: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(written.glob(f"{what}_[0-9].json"))]


def test_two_ranks_read_the_weights_and_moments_of_one(written: Path) -> None:
    expected = json.loads((written / "one.json").read_text())
    assert any(name.startswith("exp_avg_sq/value_head") for name in expected)
    assert not any("lm_head" in name for name in expected), "tied weights are there once"
    for of_rank in seen(written, "write"):
        assert (of_rank["begun"], of_rank["updates"]) == (1, 2)
        assert of_rank["of_one"] == expected


@pytest.mark.parametrize("directory", ["many", "more"])
def test_one_and_three_ranks_read_a_checkpoint_of_two(written: Path, directory: str) -> None:
    """Three of them with moments on the host and in mixed precision, and one reads the checkpoint of those."""
    expected = seen(written, "write")[0]["saved_2"]
    for of_rank in seen(written, "read"):
        assert of_rank["begun"] == 2 and of_rank["read"] == expected
    step = make(ALONE, seed=8)
    assert checkpoints(written / directory, ALONE).restore(step.model, step.optimizer) == 2
    assert digests(step) == expected


def test_all_ranks_go_back_to_the_same_checkpoint_when_one_sees_damage(written: Path) -> None:
    for of_rank in seen(written, "write"):
        assert of_rank["fell_back_to"] == 2
        assert of_rank["restored"] == of_rank["saved_2"] != of_rank["saved_3"]
        assert of_rank["set_aside"] == ["step_000003.damaged"]
        assert of_rank["random"], "each rank has its own generator back"


def test_a_refusal_and_a_failed_save_raise_on_every_rank(written: Path) -> None:
    for of_rank in seen(written, "write"):
        assert "belongs to run_id 'r', not to 'x'" in of_rank["refused"]
        assert "rank 1: [Errno 28] No space left on device" in of_rank["failed"]
    assert sorted(path.name for path in (written / "many").iterdir()) == ["step_000002", "step_000003.damaged"]
