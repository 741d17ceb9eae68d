"""A tracker gets every row once and in order, whatever happens to it or to its process."""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from extras.trackers.follow import Follower
from extras.trackers.sinks import TrackerDown
from services.common import run_files
from services.common.telemetry.metrics import MetricsWriter, RowKind
from services.orchestrator.metrics import Row
from services.orchestrator.trackers import all_sent, position_file, read_position
from tests.unit.orchestrator.metrics_rows import write_run


class Recorder:
    """A sink that keeps what it takes, and is down when told."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.down = False
        self.closed = 0

    def send(self, rows: Sequence[Row]) -> None:
        if self.down:
            raise TrackerDown("no answer [red]")
        self.rows += rows

    def close(self) -> None:
        self.closed += 1


def follower_of(run_dir: Path, sink: Recorder) -> Follower:
    return Follower(run_dir, "recorder", lambda: sink)


@settings(max_examples=25, deadline=None)
@given(actions=st.lists(st.sampled_from(["write", "poll", "down", "up", "restart", "torn"]), max_size=30))
def test_every_row_arrives_once_and_in_order(actions: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_dir, sink, written = Path(folder), Recorder(), 0
        writer = MetricsWriter(run_files.metrics(run_dir))
        following = follower_of(run_dir, sink)
        for action in [*actions, "up", "write", "poll"]:
            if action == "write":
                writer.write(RowKind.TRAINING_STEP, policy="model0", step=written)
                written += 1
            elif action == "poll":
                following.poll()
            elif action == "restart":
                following = follower_of(run_dir, sink)
            elif action == "torn":  # a write that is going on: its end comes with the next row
                half, rest = b'{"time": 1.0, "kind": "stall"', b', "torn": 1}\n'
                with run_files.metrics(run_dir).open("ab", buffering=0) as file:
                    file.write(half)
                    following.poll()
                    file.write(rest)
            else:
                sink.down = action == "down"
        writer.close()
        assert [row["step"] for row in sink.rows if "step" in row] == list(range(written))
        assert all_sent(run_dir, "recorder")


def test_a_stop_during_an_outage_ends_it_with_the_rows_kept(tmp_path: Path) -> None:
    write_run(tmp_path, summary=False)
    sink, stop = Recorder(), threading.Event()
    sink.down = True
    stop.set()
    following = follower_of(tmp_path, sink)
    following.run(stop)
    assert not following.complete and read_position(tmp_path, "recorder").offset == 0


def test_a_damaged_position_begins_again(tmp_path: Path) -> None:
    write_run(tmp_path)
    position_file(tmp_path, "recorder").parent.mkdir()
    for damaged in ("{", json.dumps({"unknown": 1}), ""):
        position_file(tmp_path, "recorder").write_text(damaged)
        assert read_position(tmp_path, "recorder").offset == 0
