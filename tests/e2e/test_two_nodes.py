"""Two machines (namespaces joined by a cable), the command that node 0 prints executed on node 1, everything over TLS."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import orjson
import pytest

from services.common.telemetry.logs import LogEvent
from services.orchestrator.journal import entries
from services.orchestrator.journal.reader import JournalReader
from tests import needs
from tests.recipe_runs import rows
from tests.two_machines import Machine, TwoMachines, two_machines

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


# --- A run on two machines (``tests/two_machines.py``), started by hand: node 0 prints commands, node 1 executes these

RECIPE = "recipes/quickstart-code"
WAIT_S = 240.0
SETTINGS = (
    "inference.a.node=1",
    "envgateway.node=1",
    "envgateway.sandbox.allow_tier_0=true",  # root in a container: what the tiny model writes are lines of a script
    "run.id=two",
    "run.steps=100000",  # the test ends it
    "run.until=null",
    "evaluation.at_start=false",
    "evaluation.at_end=false",
    "evaluation.every=0",
    "orchestrator.lease_s=3",
    "policies.model0.weights.transfer=delta",
    "policies.model0.batch.size=8",
    "policies.model0.batch.minibatches=1",
    "policies.model0.batch.late=keep",  # else slots that wait for another replica are cancelled as too old
)


class TwoNodeRun:
    """``start``, ``paste``, look; ``stop`` ends the remaining processes. ``output`` of each node lies in the directory."""

    def __init__(self, machines: TwoMachines, directory: Path) -> None:
        self.machines = machines
        self.run_dir = machines.node0.directory / "runs" / "two"
        self._directory = directory
        self._environment = {"PATH": machines.path, "PYTHON": sys.executable, "COLUMNS": "300"}
        self._environment |= dict.fromkeys(("ROLLMILL_KEYS", "NODE_HOST", "ORCHESTRATOR_HOST_EXTERNAL", "RUN_DIR"), "")
        self.node0: subprocess.Popen[str] | None = None
        self.node1: subprocess.Popen[str] | None = None
        self._started: list[subprocess.Popen[str]] = []

    def start(self) -> None:
        """``rollmill run`` on node 0; returns when the commands for node 1 are printed."""
        arguments = [part for setting in (*SETTINGS, f"run.dir={self.run_dir.parent}") for part in ("--set", setting)]
        command = ["run", RECIPE, "--profile", "tiny", *arguments]
        self.node0 = self.rollmill(self.machines.node0, *command, output="node0")
        self.wait_for(
            lambda: len(self.printed()) == 3 and self.output("node0").endswith("\n"), "the commands for node 1"
        )

    def printed(self) -> list[str]:
        """The lines that node 0 printed for node 1: instructions, then commands."""
        lines = self.output("node0").splitlines()
        begin = next((n for n, line in enumerate(lines) if line.startswith("paste on node 1")), len(lines))
        return lines[begin : begin + 3]

    def paste(self) -> None:
        """Execute on node 1 exactly the printed lines."""
        self.node1 = self._popen(self.machines.node1, ["bash", "-c", "\n".join(self.printed()[1:])], "node1")

    def rollmill(self, machine: Machine, *arguments: str, output: str, **variables: str) -> subprocess.Popen[str]:
        """Start a command of ``rollmill`` on a machine."""
        return self._popen(machine, [sys.executable, "-m", "services.cli", *arguments], output, variables)

    def ask(self, command: str, role: str = "operator") -> str:
        """Run a command for people on node 0, with the keys of a role; returns its output. Raises on failure."""
        recipe = json.loads((self.run_dir / "recipe.json").read_text())
        address = f"{recipe['orchestrator']['host']}:{recipe['orchestrator']['port']}"
        keys = str(self.run_dir / "keys" / role)
        process = self.rollmill(
            self.machines.node0, command, "--orchestrator", address, output="asked", ROLLMILL_KEYS=keys
        )
        code = process.wait(60)
        assert code == 0, self.output("asked")
        return self.output("asked")

    def output(self, name: str) -> str:
        path = self._directory / f"{name}.out"
        return path.read_text() if path.exists() else ""

    def records(self) -> list[dict[str, Any]]:
        """Every trajectory and failure in the journal."""
        with closing(JournalReader(self.run_dir / "journal")) as reader:
            found = [row for row in reader.rows() if row.kind in (entries.TRAJECTORY, entries.FAILURE)]
            return [record for row in found if (record := reader.load(row)) is not None]

    def trajectories(self) -> Counter[str]:
        """How many each replica has brought."""
        return Counter(row["replica_id"] for row in self.records() if "sequences" in row)

    def is_member(self, replica: str) -> bool:
        """Whether the replica is a member of the orchestrator's pool: joined, with a valid lease."""
        member = False
        for file in sorted((self.run_dir / "logs").glob("orchestrator*.jsonl")):
            for line in file.read_bytes().splitlines():
                if any(
                    b'"event":"%b"' % event.encode() in line for event in (LogEvent.REPLICA_JOINED, LogEvent.LEASE_LOST)
                ):
                    row = orjson.loads(line)
                    member = row["event"] == LogEvent.REPLICA_JOINED if row["replica"] == replica else member
        return member

    def steps(self) -> int:
        """Training steps that are done, of all policies."""
        return len(rows(self.run_dir, "training_step"))

    def events(self, name: str, files: Sequence[Path]) -> list[dict[str, Any]]:
        """Log events of one name in these files."""
        mark = f'"event":"{name}"'.encode()
        return [orjson.loads(line) for file in files for line in file.read_bytes().splitlines() if mark in line]

    def transfers(self, what: str) -> set[str]:
        """The values of a field of the versions that node 1 took."""
        return {event[what] for event in self.events(LogEvent.WEIGHTS_UPDATED, self.logs_of_node1())}

    def logs_of_node1(self) -> list[Path]:
        return sorted((self.machines.node1.checkout / "runs" / "two-node1" / "logs").glob("*.jsonl"))

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        """Wait until the condition holds. Raises when the run on node 0 ends before."""
        begin = looked = time.monotonic()
        while not condition():
            cost_s = time.monotonic() - looked
            outputs = f"{self.output('node0')}\n{self.output('node1')}"
            assert self.node0 is not None and self.node0.poll() is None, f"the run ended before {what}:\n{outputs}"
            assert time.monotonic() - begin < WAIT_S, f"no {what} in {WAIT_S} s:\n{outputs}"
            time.sleep(max(0.1, 5 * cost_s))  # reading the journal takes no time from the run that is waited for
            looked = time.monotonic()

    def wait_for_more(self, replica: str) -> None:
        """Wait until a replica is a member and has brought another trajectory."""
        before = self.trajectories()[replica]
        self.wait_for(
            lambda: self.is_member(replica) and self.trajectories()[replica] > before, f"a trajectory of {replica}"
        )

    def wait_until_lost(self, replica: str) -> None:
        self.wait_for(lambda: not self.is_member(replica), f"the end of {replica}'s lease")

    def stop(self) -> None:
        for process in reversed(self._started):  # node 1 first
            if process.poll() is None:
                process.terminate()
            process.wait(60)

    def _popen(
        self, machine: Machine, command: list[str], output: str, variables: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        with (self._directory / f"{output}.out").open("w") as file:
            self._started.append(machine.popen(command, {**self._environment, **(variables or {})}, file))
        return self._started[-1]


def slots_with_two_records(run: TwoNodeRun) -> int:
    """Slots that the journal holds twice: none, also after lost records."""
    counts = Counter((row["task_group_id"], row["index"]) for row in run.records())
    return sum(count > 1 for count in counts.values())


def failures(run: TwoNodeRun) -> int:
    """Slots that were given up instead of played again."""
    return sum("sequences" not in row for row in run.records())
