"""Two nodes over TLS, and one of them lost and back in mid-run, three ways.

    python benchmarks/two_nodes.py [--quick]

Two machines are made of namespaces on this one (`_machines.py`): node 0 starts the two-node recipe with a tiny model
and prints commands for node 1; node 1 executes these, and its inference service a plays beside b on node 0. Then node 1
is lost: its cable is out; its incoming packets vanish while its own still arrive (half-open connections); all its
processes are killed at once. Each time the script measures, beginning with the loss, the seconds until the next
training step and until the work of a has been given away (`orchestrator.lease_s`), and, beginning with the return,
those until a brings a trajectory again. At the end the journal is searched for slots with two records, and for slots
given up.

The last line is a JSON object. `ours` are the median seconds from return to contributing; there is no other system's
comparison (`theirs` 0). Needs root, and iptables for the half-open connections; without them the script reports the
missing parts (`left_out`) and ends with 0.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

from services.common.telemetry.logs import LogEvent

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._machines import two_machines
from benchmarks._needs import why_not
from benchmarks._report import report, report_nothing
from benchmarks._two_nodes import DELTAS, TwoNodeRun, failures, slots_with_two_records

LEASE_S = 5.0


class Losses:
    """The figures of each loss."""

    def __init__(self, run: TwoNodeRun, away_s: float, there_s: float) -> None:
        self.run = run
        self.away_s = away_s
        self.there_s = there_s
        self.going_on_s: list[float] = []
        self.given_away_s: list[float] = []
        self.back_s: list[float] = []

    def lost(self, how: str) -> None:
        """Called in the moment of the loss; returns when node 1 has been away for ``away_s``."""
        begin, run = time.monotonic(), self.run
        steps = run.steps()
        run.wait_for(lambda: run.steps() > steps, "a training step without node 1")
        self.going_on_s.append(time.monotonic() - begin)
        run.wait_until_lost("a")
        self.given_away_s.append(time.monotonic() - begin)
        time.sleep(max(0.0, self.away_s - (time.monotonic() - begin)))
        print(
            f"{how}: next step after {self.going_on_s[-1]:.1f} s, work given away after {self.given_away_s[-1]:.1f} s"
        )

    def back(self, how: str) -> None:
        """Called when node 1 may be there again."""
        self.back_s.append(self.run.wait_for_more("a"))
        print(f"{how}: a brings a trajectory {self.back_s[-1]:.1f} s after the return")
        time.sleep(self.there_s)


def measure(directory: Path, rounds: int) -> None:
    no_swallowing = why_not("iptables")
    with two_machines(directory) as machines:
        run = TwoNodeRun(machines, directory, *DELTAS, "run.steps=100000", f"orchestrator.lease_s={LEASE_S}")
        try:
            run.start()
            run.paste()
            joined_s = run.wait_for(lambda: run.trajectories()["a"] > 0, "the first trajectory of a")
            print(f"a brings its first trajectory {joined_s:.1f} s after the command was pasted")
            run.wait_for(lambda: run.trajectories()["b"] > 0, "a trajectory of b")
            # With one round, node 1 is away until its work has been given away, and no longer.
            losses = Losses(run, away_s=LEASE_S + (0.0 if rounds == 1 else 7.0), there_s=0.5 if rounds == 1 else 2.0)
            for _ in range(rounds):
                machines.unplug()
                losses.lost("cable out")
                machines.plug_in()
                losses.back("cable in")
                if no_swallowing is None:
                    with machines.swallowing():
                        losses.lost("half-open")
                    losses.back("packets pass")
                machines.node1.switch_off()
                losses.lost("all processes killed")
                machines.switch_on_node1()
                run.paste()
                losses.back("pasted again")
            run.ask("stop")
            assert run.node0 is not None and run.node0.wait(120) == 0, run.output("node0")
            transfers = run.events(LogEvent.WEIGHTS_UPDATED, run.logs_of_node1())
        finally:
            run.stop()
        brought = run.trajectories()
        report(
            "two_nodes",
            ours=statistics.median(losses.back_s),
            theirs=0.0,
            ratio=0.0,
            spread=(max(losses.back_s) - min(losses.back_s)) / 2 / statistics.median(losses.back_s),
            trajectories_node_0=brought["b"],
            trajectories_node_1=brought["a"],
            first_contribution_s=joined_s,
            loss_to_next_step_s=losses.going_on_s,
            loss_to_work_given_away_s=losses.given_away_s,
            return_to_contribution_s=losses.back_s,
            lease_s=LEASE_S,
            training_steps=run.steps(),
            slots_with_two_records=slots_with_two_records(run),
            slots_given_up=failures(run),
            transfers_to_node_1={
                mode: sum(t["mode"] == mode for t in transfers) for mode in sorted({t["mode"] for t in transfers})
            },
            transports=sorted({t["transport"] for t in transfers}),
            left_out={} if no_swallowing is None else {"half-open connections": no_swallowing},
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="each loss once instead of three times")
    options = parser.parse_args()
    if reason := why_not("two machines"):
        report_nothing("two_nodes", reason)
        return
    with tempfile.TemporaryDirectory(prefix="rollmill-two-nodes-") as directory:
        measure(Path(directory), 1 if options.quick else 3)


if __name__ == "__main__":
    main()
