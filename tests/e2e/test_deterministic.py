"""``run.deterministic``: one seed gives every version the same bits, for any number of replicas and any killed process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks._journal_audit import audit
from services.orchestrator.journal import entries
from services.orchestrator.journal.reader import JournalReader
from tests.e2e.conftest import Run

pytestmark = pytest.mark.slow

STEPS = 4
SETTINGS = [
    f"run.steps={STEPS}",
    "run.deterministic=true",
    "policies.model0.batch.size=16",
    "policies.model0.batch.max_staleness=0",
    "policies.model0.trainer.export_final=false",
    "data.evaluation={}",
    "evaluation.at_start=false",
    "evaluation.at_end=false",
    "rollout.infra_retries=9",
    "orchestrator.retention=all",
    "workflow.settings.reward=benchmarks._chaos_hooks:share_of_digits",
]
ONE_REPLICA = "inference={a: {port: 0, num_slots: 8, device: cpu}}"
TWO_REPLICAS = "inference={a: {port: 0, num_slots: 8, device: cpu}, b: {port: 0, num_slots: 8, device: cpu}}"


def digests(run: Run) -> dict[int, str]:
    """Of every version, from a journal without findings of the audit."""
    reader = JournalReader(run.directory / "journal")
    try:
        found = audit(reader, finished=True)
        assert found.clean, found.violations
        rows = [reader.load(row) for row in reader.rows_of(entries.VERSION)]
        return {row["number"]: row["digest"] for row in rows if row is not None}
    finally:
        reader.close()


def test_an_undisturbed_and_a_killed_run_publish_the_same_bits(start_run: Callable[..., Run]) -> None:
    undisturbed = start_run("undisturbed", *SETTINGS, ONE_REPLICA)
    killed = start_run("killed", *SETTINGS, TWO_REPLICAS)
    for step, process in ((1, "trainer-model0"), (2, "inference-a"), (3, "orchestrator")):
        killed.wait_for(lambda step=step: killed.steps() >= step, f"step {step}")
        killed.kill(process)
    for run in (undisturbed, killed):
        run.finish()
        assert run.steps() == STEPS
    expected = digests(undisturbed)
    assert len(set(expected.values())) == STEPS + 1, "every step changes the weights"
    assert digests(killed) == expected
