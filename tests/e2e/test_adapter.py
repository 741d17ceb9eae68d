"""A run that trains an adapter, through a killed trainer: the versions are the adapter's, and the digests are those of a
replay."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from services.cli.inspect.checkpoints import replay_step
from services.common.checkpoints import read_manifest
from services.common.export import ExportForm, export_checkpoint
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
        "evaluation.at_start=false",
        "evaluation.at_end=false",
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
