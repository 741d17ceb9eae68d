"""On-policy distillation from a policy that is not trained: a whole run, through a killed orchestrator and a killed replica."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from services.cli.inspect.checkpoints import replay_step
from services.cli.inspect.fate import read_fates
from services.common.config.loading import load_recipe
from services.common.config.recipe import warm_start_dir
from services.common.records import TokenSequence
from services.common.text.chat import load_model
from services.orchestrator.buffer.assembly import read_batch
from services.orchestrator.journal.reader import JournalReader
from services.trainer.warm_start import make_starting_checkpoint
from tests.e2e.conftest import REPOSITORY, Run

pytestmark = pytest.mark.slow

STEPS = 10


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    """The quickstart's model after more updates of its warm start than the student of these tests had."""
    more = ["warm_start.model0.steps=30", "warm_start.model0.batch_size=64"]
    make_starting_checkpoint(
        load_recipe(REPOSITORY / "recipes" / "quickstart", more, {}), "model0", tmp_path / "teacher"
    )
    return warm_start_dir(tmp_path / "teacher", "model0")


def gap_to(model: torch.nn.Module, sequence: TokenSequence) -> float:
    """Largest distance of a sequence's scores from a plain forward pass of the model."""
    ids = torch.as_tensor(sequence.token_ids, dtype=torch.int64)
    with torch.no_grad():
        logprobs = model(input_ids=ids[None]).logits[0, :-1].float().log_softmax(-1)
    own = logprobs.gather(1, ids[1:, None])[:, 0].numpy()
    starts = np.cumsum([0, *(s.num_tokens for s in sequence.segments)])
    return max(
        float(np.abs(own[start - 1 : start - 1 + s.num_tokens] - s.teacher_logprobs).max())
        for start, s in zip(starts, sequence.segments, strict=False)
        if s.is_policy and s.num_tokens
    )


def test_a_student_comes_nearer_to_a_served_teacher_through_kills_and_replays_to_the_same_bits(
    start_run: Callable[..., Run], teacher: Path
) -> None:
    policy = {"trained": False, "model": {"path": str(teacher), "context_length": 128}}
    policy["weights"] = {"publish_dtype": "float32"}
    run = start_run(
        "distils",
        f"run.steps={STEPS}",
        f"policies.teacher={json.dumps(policy)}",
        "policies.model0.algorithm={name: reinforce, distillation: {teacher: teacher}}",
        "policies.model0.optimizer.lr=2.0e-3",
        "policies.model0.batch.size=64",
        "policies.model0.batch.minibatches=4",
    )
    run.wait_for(lambda: run.steps() >= 2, "the second step")
    run.kill("orchestrator")
    run.wait_for(lambda: run.steps() >= 4, "the fourth step")
    run.kill("inference-a")
    run.finish()
    rows = {row["step"]: row for row in run.rows("training_step")}
    kl = [rows[step]["trainer/distillation_kl"] for step in range(1, STEPS + 1)]
    assert np.mean(kl[-3:]) < 0.7 * np.mean(kl[:3]), kl
    assert set(json.loads((run.directory / "pids.json").read_text())) == {
        "orchestrator", "inference-a", "trainer-model0", "envgateway",
    }  # fmt: skip
    model = load_model(str(teacher), "float32")
    reader = JournalReader(run.directory / "journal")
    batches = [read_batch(reader, "model0", step) for step in range(1, STEPS + 1)]
    reader.close()
    sequences = [sequence for batch in batches for sequence in batch.sequences.values()]
    assert {sequence.policy for sequence in sequences} == {"model0"}
    assert max(gap_to(model, sequence) for sequence in sequences[::7]) <= 1e-4
    found = read_fates(run.directory)
    assert found.policies == ["model0"] and all(check.holds for check in found.checks), found.checks
    result = replay_step(run.directory, "model0", STEPS)
    assert result["equal"], result
