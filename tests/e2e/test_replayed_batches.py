"""A run that replays, shapes rewards, pays KL in them and truncates its sampling, through a killed orchestrator: batches are
what they were."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from services.cli.inspect.checkpoints import replay_step
from services.orchestrator.buffer.assembly import read_batch
from services.orchestrator.journal.reader import JournalReader
from tests.e2e.conftest import Run

pytestmark = pytest.mark.slow

STEPS = 4


def test_replayed_sequences_are_marked_and_trained_to_the_same_bits_after_a_kill(start_run: Callable[..., Run]) -> None:
    run = start_run(
        "replays",
        f"run.steps={STEPS}",
        "policies.model0.batch.replay={ratio: 0.5, max_staleness: 4}",
        "policies.model0.batch.overlong_penalty={max_tokens: 40, buffer_tokens: 40, factor: 0.5}",
        "policies.model0.algorithm.name=sapo",
        "policies.model0.algorithm.kl_reward_coefficient=0.01",
        "sampling.top_p=0.9",
        "evaluation.at_start=false",
        "evaluation.at_end=false",
    )
    run.wait_for(lambda: run.steps() >= 2, "the second step")
    run.kill("orchestrator")
    run.finish()
    reader = JournalReader(run.directory / "journal")
    batches = {step: read_batch(reader, "model0", step) for step in range(1, STEPS + 1)}
    reader.close()
    trained: set[str] = set()
    for step, batch in batches.items():
        fresh = {entry.sequence_id for entry in batch.record.entries if not entry.replayed}
        again = [entry for entry in batch.record.entries if entry.replayed]
        assert not fresh & trained and {entry.sequence_id for entry in again} <= trained
        assert len(again) >= (0 if step == 1 else 16) and all(entry.staleness <= 4 for entry in again)
        assert all(-0.5 <= s.reward <= 1.0 for s in batch.sequences.values())
        assert all(bool(g.kept) == g.is_policy for s in batch.sequences.values() for g in s.segments if g.num_tokens)
        assert any(s.reward not in (0.0, 1.0) for s in batch.sequences.values()), "somebody paid for length"
        trained |= fresh
    rows = {row["step"]: row for row in run.rows("training_step")}
    assert rows[STEPS]["num_replayed"] >= 16 and "trainer/faded_share" in rows[STEPS]
    result = replay_step(run.directory, "model0", STEPS)
    assert result["equal"], result
