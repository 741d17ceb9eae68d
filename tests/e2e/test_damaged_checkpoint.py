"""A run whose newest checkpoint is damaged while its trainer is down: the run goes on from the one before, to the same
bits."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from typer.testing import CliRunner

from services.cli.__main__ import app
from services.cli.inspect.checkpoints import replay_step
from services.common.checkpoints import path_of, set_aside_before, steps
from services.common.export import NOTE
from services.common.telemetry.logs import LogEvent
from tests.e2e.conftest import Run

pytestmark = pytest.mark.slow

STEPS = 8


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(start_run: Callable[..., Run]) -> None:
    """Versions that are trained again have the digests that the ledger knows, so the weights are those of an undisturbed
    run."""
    run = start_run("damaged", f"run.steps={STEPS}", "evaluation.at_start=false", "evaluation.at_end=false")
    directory = run.directory / "checkpoints" / "model0"
    run.wait_for(lambda: len(steps(directory)) == 2, "the second checkpoint")
    run.kill("trainer-model0")
    newest = steps(directory)[-1]
    harmed = path_of(directory, newest) / "optimizer_00000.safetensors"
    content = bytearray(harmed.read_bytes())
    content[len(content) // 2] ^= 1
    harmed.write_bytes(content)
    run.finish()

    assert [(step, path.name) for step, path in set_aside_before(directory)] == [
        (newest, f"{harmed.parent.name}.damaged")
    ]
    logged = [json.loads(line) for line in (run.directory / "logs" / "trainer-model0.jsonl").read_text().splitlines()]
    events = {event["event"]: event for event in logged}
    assert "optimizer_00000.safetensors is damaged" in events[LogEvent.CHECKPOINT_DAMAGED]["reason"]
    assert events[LogEvent.CHECKPOINT_LOADED]["step"] == newest - 2
    assert LogEvent.STEP_REPLAYED in events and LogEvent.VERSION_DIFFERS not in events
    assert run.steps() == STEPS and replay_step(run.directory, "model0", STEPS)["equal"]
    note = json.loads((run.directory / "export" / "model0" / NOTE).read_text())
    assert (note["run_id"], note["training_step"]) == ("damaged", STEPS)
    listed = CliRunner().invoke(app, ["checkpoints", str(run.directory), "--verify"])
    assert listed.exit_code == 1 and "set aside" in listed.output and "verified" in listed.output
