"""Two machines (namespaces joined by a cable), the command that node 0 prints executed on node 1, everything over TLS."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.cli.keys import Keyring
from services.common.telemetry.logs import LogEvent
from tests import needs
from tests.e2e.two_node_run import DELTAS, TwoNodeRun, failures, slots_with_two_records
from tests.two_machines import TwoMachines, two_machines

pytestmark = pytest.mark.slow

LEASE_S = 3.0
# The test waits for training steps, whatever they hold.
SMALL_STEPS = ("batch.size=8", "batch.minibatches=1", "trainer.gradient_checkpointing=false")
BOUNDED_S = 120.0  # a process that waits for 2 s, and its start


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[TwoMachines]:
    needs.check("two machines")
    with two_machines(tmp_path) as made:
        yield made


def test_node_1_plays_over_tls_is_lost_twice_and_comes_back_and_no_slot_is_lost_or_played_twice(
    machines: TwoMachines, tmp_path: Path
) -> None:
    # The recipe drops what is late, and would cancel slots that wait for another replica as too old.
    changed = ("batch.late=keep", *SMALL_STEPS)
    settings = [f"policies.{policy}.{setting}" for policy in ("model0", "model1") for setting in changed]
    run = TwoNodeRun(machines, tmp_path, *DELTAS, *settings, "run.steps=100000", f"orchestrator.lease_s={LEASE_S}")

    def joins() -> None:
        run.ask("pause")  # node 0 need not train while node 1 imports and loads
        run.paste()
        run.wait_for(lambda: run.is_member("a"), "the joining of node 1")
        run.ask("resume")

    try:
        run.start()
        joins()
        run.wait_for_more("a", 8)
        run.wait_for(lambda: run.trajectories()["b"], "a trajectory of node 0")

        def goes_on_without_node_1() -> None:
            run.wait_until_lost("a")
            steps = run.steps()
            run.wait_for(lambda: run.steps() >= steps + 2, "training steps without node 1")

        machines.unplug()
        goes_on_without_node_1()
        machines.plug_in()
        run.wait_for_more("a")
        assert run.node1 is not None and run.node1.poll() is None, "the same process healed"

        machines.node1.switch_off()
        goes_on_without_node_1()
        machines.switch_on_node1()
        joins()
        run.wait_for_more("a", 4)

        assert "training" in run.ask("status", "viewer")
        run.ask("stop")
        assert run.node0 is not None and run.node0.wait(120) == 0, run.output("node0")
        assert run.node1.wait(60) == 0, run.output("node1")
    finally:
        run.stop()
    assert json.loads((run.run_dir / "summary.json").read_text())["state"] == "stopped"
    assert slots_with_two_records(run) == 0
    assert failures(run) == 0, "what node 1 had begun was played again, not given up"
    transfers = run.events(LogEvent.WEIGHTS_UPDATED, run.logs_of_node1())
    assert {transfer["transport"] for transfer in transfers} <= {"grpc", "bulk"}, "no memory is shared"
    assert {"delta", "full"} == {transfer["mode"] for transfer in transfers}, "changes, and all after an absence"
    assert secrets_in(run) == []


def test_the_run_finishes_its_steps_with_inference_on_node_1_alone(machines: TwoMachines, tmp_path: Path) -> None:
    """The inputs of node 1 all come from the bundle: settings, keys, starting checkpoint."""
    run = TwoNodeRun(machines, tmp_path, "run.steps=2", "evaluation.at_start=false", recipe="recipes/quickstart")
    try:
        run.start()
        run.paste()
        assert run.node0 is not None and run.node0.wait(240) == 0, run.output("node0")
        assert run.node1 is not None and run.node1.wait(60) == 0, run.output("node1")
    finally:
        run.stop()
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert (summary["state"], summary["steps"]) == ("finished", {"model0": 2})
    assert set(run.trajectories()) == {"a"}


def test_programs_are_judged_on_node_1_by_one_setting(machines: TwoMachines, tmp_path: Path) -> None:
    run = TwoNodeRun(
        machines,
        tmp_path,
        *("run.steps=2", "inference.a.node=0", "envgateway.node=1", "evaluation.at_start=false"),
        recipe="recipes/quickstart-code",
    )
    try:
        run.start()
        run.wait_for(lambda: "envgateway.node" in run.ask("status", "viewer"), "the wait for the gateway of node 1")
        assert run.records() == [], "nothing is issued without it"
        run.paste()
        assert run.node0 is not None and run.node0.wait(240) == 0, run.output("node0")
        assert run.node1 is not None and run.node1.wait(60) == 0, run.output("node1")
    finally:
        run.stop()
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert (summary["state"], summary["steps"]) == ("finished", {"model0": 2})
    assert run.trajectories()["a"] and failures(run) == 0
    assert run.events(LogEvent.RUN_ENDED, run.logs_of_node1()), "the gateway left with the run"
    assert [file.name for file in (run.run_dir / "logs").iterdir() if "envgateway" in file.name] == []


@pytest.mark.needs("iptables")
def test_what_is_in_the_way_is_said_on_node_1(machines: TwoMachines, tmp_path: Path) -> None:
    """Needs no run: a bundle of one, and a node 0 that does not answer."""
    bundle = machines.node1.checkout / "runs" / "mine"
    Keyring.make(bundle / "keys", "mine")
    recipe = json.dumps({"extends": "../../recipes/quickstart/recipe.yaml", "inference": {"a": {"node": 1}}})
    (bundle / "recipe.yaml").write_text(recipe)
    settings = ["launch.ready_timeout_s=2", "orchestrator.port=50050"]
    arguments = ["start", "runs/mine", "inference-a", *(part for setting in settings for part in ("--set", setting))]
    run = TwoNodeRun(machines, tmp_path)

    def told(**variables: str) -> str:
        process = run.rollmill(machines.node1, *arguments, output="told", **variables)
        assert process.wait(BOUNDED_S) != 0
        return run.output("told")

    node_0, keys = "ORCHESTRATOR_HOST_EXTERNAL", {"ROLLMILL_KEYS": "runs/mine/keys/inference"}
    assert f"set {node_0} to the host name of the node that runs the orchestrator" in told(**keys)
    assert "this machine cannot resolve the name nobody.invalid" in told(**{node_0: "nobody.invalid"}, **keys)
    assert "10.77.0.9 cannot be reached: No route to host, for" in told(**{node_0: "10.77.0.9"}, **keys)
    with machines.swallowing():
        assert "no answer from node0 at port 50050, for" in told(**{node_0: "node0"}, **keys)
    assert "holds keys of role operator, but this process is inference" in told(
        **{node_0: "node0"}, ROLLMILL_KEYS="runs/mine/keys/operator"
    )
    assert "copy its bundle from node 0 and set ROLLMILL_KEYS" in told(**{node_0: "node0"}, RUN_DIR="runs/other")


def secrets_in(run: TwoNodeRun) -> list[Path]:
    """Logs and printed words that hold a token of the run."""
    tokens = [file.read_bytes().strip() for file in (run.run_dir / "keys").rglob("token")]
    assert tokens
    written = [*run.logs_of_node1(), *(run.run_dir / "logs").iterdir(), *run.run_dir.parents[2].glob("*.out")]
    return [file for file in written if any(token in file.read_bytes() for token in tokens)]
