"""Two machines (namespaces joined by a cable), the command that node 0 prints executed on node 1, everything over TLS."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.common.telemetry.logs import LogEvent
from tests import needs
from tests.e2e.two_node_run import TwoNodeRun, failures, slots_with_two_records
from tests.two_machines import TwoMachines, two_machines

pytestmark = pytest.mark.slow


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[TwoMachines]:
    needs.check("two machines")
    with two_machines(tmp_path) as made:
        yield made


def test_node_1_plays_and_judges_over_tls_is_lost_twice_and_comes_back_and_no_slot_is_lost_or_played_twice(
    machines: TwoMachines, tmp_path: Path
) -> None:
    """All inputs of node 1 come from the bundle: settings, keys, starting checkpoint."""
    run = TwoNodeRun(machines, tmp_path)
    try:
        run.start()
        run.wait_for(lambda: "envgateway.node" in run.ask("status", "viewer"), "the wait for the gateway of node 1")
        assert run.records() == [], "nothing is issued without it"
        run.paste()
        run.wait_for(lambda: "delta" in run.transfers("mode"), "a version as its changes")
        machines.unplug()
        run.wait_until_lost("a")
        machines.plug_in()
        run.wait_for_more("a")
        assert run.node1 is not None and run.node1.poll() is None, "the same processes healed"

        machines.node1.switch_off()
        run.wait_until_lost("a")
        machines.switch_on_node1()
        run.paste()
        steps = run.steps()
        run.wait_for(lambda: run.steps() > steps, "a training step after the loss")
        run.ask("stop")
        assert run.node0 is not None and run.node0.wait(120) == 0, run.output("node0")
        assert run.node1.wait(60) == 0, run.output("node1")
    finally:
        run.stop()
    assert json.loads((run.run_dir / "summary.json").read_text())["state"] == "stopped"
    assert set(run.trajectories()) == {"a"}
    assert slots_with_two_records(run) == 0
    assert failures(run) == 0, "what node 1 had begun was played again, not given up"
    assert run.transfers("transport") <= {"grpc", "bulk"}, "no memory is shared"
    assert run.transfers("mode") == {"delta", "full"}, "changes, and all after an absence"
    assert run.events(LogEvent.RUN_ENDED, run.logs_of_node1()), "the gateway left with the run"
    assert [file.name for file in (run.run_dir / "logs").iterdir() if "envgateway" in file.name] == []
