"""Runs with killed processes train the same weights, bit for bit, as a replay of the journal."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks._journal_audit import audit
from services.cli.inspect.checkpoints import replay_step
from services.common.checkpoints import read_manifest
from services.common.export import ExportForm, export_checkpoint
from services.orchestrator.buffer.assembly import read_batch
from services.orchestrator.journal import entries
from services.orchestrator.journal.reader import JournalReader
from tests.e2e.conftest import Run

pytestmark = pytest.mark.slow

STEPS = 4


def test_an_adapter_is_trained_served_and_exported_through_a_killed_trainer(start_run: Callable[..., Run]) -> None:
    run = start_run(
        "adapted",
        f"run.steps={STEPS}",
        "policies.model0.adapter={rank: 4, alpha: 8}",
        "policies.model0.algorithm.kl_reward_coefficient=0.01",
        "policies.model0.trainer.checkpoint_every=2",
        "policies.model0.batch.max_staleness=0",  # so that the last batch needs the version before it
    )
    run.wait_for(lambda: run.steps() >= 3, "the third step")
    run.kill("trainer-model0")
    run.finish()
    offered = run.rows("weight_transfer")
    # A fetch from the killed trainer fails; it is repeated, unless the run ends before that.
    transfers = [row for row in offered if not row["error"]]
    manifest = read_manifest(run.directory / "checkpoints" / "model0" / f"step_{STEPS:06d}")
    own = sum(t.size_bytes for name, t in manifest.tensors.items() if name.startswith("weights/"))
    assert manifest.adapter is not None and manifest.adapter.rank == 4
    assert max(row["version"] for row in offered) >= STEPS - 1 and len(transfers) >= STEPS - 2
    sizes = {(row["full_size_bytes"], row["payload_size_bytes"]) for row in transfers}
    assert all(own <= full == payload < 1.1 * own for full, payload in sizes), (own, sizes)
    # An estimate from samples, of either sign; that of the first step, whose policy is the base, is rounding.
    rounding, *distances = [abs(row["trainer/kl_reference"]) for row in run.rows("training_step")]
    assert max(distances) > rounding, "the policy leaves its base"
    result = replay_step(run.directory, "model0", STEPS)
    assert result["equal"], result
    exported = run.directory / "export" / "model0"
    assert (exported / "config.json").is_file() and not (exported / "adapter_config.json").exists()
    checkpoint = run.directory / "checkpoints" / "model0" / f"step_{STEPS:06d}"
    adapter = export_checkpoint(checkpoint, run.directory / "adapter", form=ExportForm.ADAPTER)
    assert adapter.size_bytes == own


# --- replayed, shaped and truncated batches


def test_replayed_sequences_are_marked_and_trained_to_the_same_bits_after_a_kill(start_run: Callable[..., Run]) -> None:
    run = start_run(
        "replays",
        f"run.steps={STEPS}",
        "policies.model0.batch.replay={ratio: 0.5, max_staleness: 4}",
        "policies.model0.batch.overlong_penalty={max_tokens: 40, buffer_tokens: 40, factor: 0.5}",
        "policies.model0.algorithm.name=sapo",
        "policies.model0.algorithm.kl_reward_coefficient=0.01",
        "sampling.top_p=0.9",
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


# --- deterministic runs

SETTINGS = [
    f"run.steps={STEPS}",
    "run.deterministic=true",
    "policies.model0.batch.size=16",
    "policies.model0.batch.max_staleness=0",
    "policies.model0.trainer.export_final=false",
    "data.evaluation={}",
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
