"""Trackers as a user meets them: not installed, down, told once, sent later; every row arrives once."""

from __future__ import annotations

import io
import json
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from extras.trackers import follow
from extras.trackers.follow import Follower
from extras.trackers.sinks import OtlpSink, RunFacts, TrackerDown, WandbSink
from services.cli.__main__ import app
from services.cli.check.recipe import launch_problems
from services.cli.inspect.run_state import read_metrics
from services.cli.watch import LOOK_EVERY_S, TrackersTold
from services.common import run_files
from services.common.config import processes
from services.common.config.loading import load_recipe, save_resolved
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError
from services.common.installing import install
from services.common.telemetry.metrics import MetricsWriter, RowKind
from services.orchestrator.metrics import Row
from services.orchestrator.trackers import TrackersProcess, all_sent, position_file, read_position
from tests.clock import Clock
from tests.unit.orchestrator.metrics_rows import write_run
from tests.waiting import WAIT_S, wait_until

ROOT = Path(__file__).resolve().parents[3]


def recipe(*chosen: str) -> Recipe:
    return load_recipe(ROOT / "recipes" / "quickstart", ["run.id=run0", f"run.trackers=[{','.join(chosen)}]"])


@pytest.fixture
def none_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "missing", lambda _: ["a package"])


def test_a_tracker_that_is_not_installed_is_refused_with_the_command(none_installed: None) -> None:
    told = "\n".join(launch_problems(recipe("wandb", "otlp", "tensorboard")))
    assert install("wandb") in told and install("otlp") in told
    assert "tensorboard" not in told, "its files need no package"


def test_a_tracker_without_its_extra_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "provided", lambda kind: {})
    assert "extras/trackers" in "\n".join(launch_problems(recipe("wandb")))


@pytest.mark.parametrize(
    ("chosen", "match"), [("mlflow", "wandb"), ("wandb,wandb", "named twice"), ("[wandb]", "trackers")]
)
def test_unknown_and_repeated_trackers_are_refused(chosen: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        recipe(*chosen.split(","))


def test_an_outage_and_its_end_are_told_once_and_the_rest_at_the_end(tmp_path: Path) -> None:
    sink = Recorder()
    sink.down = True
    write_run(tmp_path)
    follower, clock, output = Follower(tmp_path, "otlp", lambda: sink), Clock(), io.StringIO()
    told = TrackersTold(recipe("otlp"), tmp_path, Console(file=output, width=300), clock)

    def look() -> None:
        follower.poll()
        for _ in range(3):
            clock.now += LOOK_EVERY_S
            told.look()

    look()
    told.at_end()
    assert output.getvalue().count("otlp does not take metrics (no answer [red])") == 1
    assert f"rollmill track {tmp_path}" in output.getvalue().replace("\n", "")
    sink.down = False
    look()
    assert output.getvalue().count("takes metrics again") == 1
    before = output.getvalue()
    told.at_end()
    assert output.getvalue() == before, "all is sent"


def test_track_sends_what_is_left_and_says_what_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = Recorder()
    sink.down = True
    monkeypatch.setattr(processes, "missing", lambda _: [])
    monkeypatch.setattr(follow, "sink_maker", lambda *_: lambda: sink)
    save_resolved(recipe("otlp", "tensorboard"), tmp_path)
    write_run(tmp_path)
    refused = CliRunner().invoke(app, ["track", str(tmp_path)])
    assert "otlp: no answer" in str(refused.exception) and "run this again later" in str(refused.exception)
    sink.down = False
    sent = CliRunner().invoke(app, ["track", str(tmp_path)])
    assert sent.exit_code == 0 and f"otlp: all {len(sink.rows)} rows sent" in sent.output
    again = CliRunner().invoke(app, ["track", str(tmp_path)])
    assert again.exit_code == 0 and len(sink.rows) == 13, "what a tracker has is not sent again"


def test_track_does_not_wait_for_a_tracker_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    class Sink(Recorder):
        def close(self) -> None:
            released.wait(WAIT_S)

    monkeypatch.setattr(processes, "missing", lambda _: [])
    monkeypatch.setattr(follow, "sink_maker", lambda *_: Sink)
    monkeypatch.setattr(follow, "SILENT_S", 0.05)
    save_resolved(recipe("otlp"), tmp_path)
    write_run(tmp_path)
    refused = CliRunner().invoke(app, ["track", str(tmp_path)])
    released.set()
    assert "otlp: the log above says why" in str(refused.exception) and "run this again later" in str(refused.exception)


@pytest.mark.needs("trackio")
@pytest.mark.slow
def test_the_process_follows_a_run_and_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    run_dir = tmp_path / "run0"
    run_dir.mkdir()
    save_resolved(recipe("trackio"), run_dir)
    write_run(run_dir, steps=range(1, 3), summary=False)
    running = TrackersProcess(recipe("trackio"), run_dir)
    wait_until(lambda: (tmp_path / "trackio" / "quickstart.db").exists(), "trackio's database")
    write_run(run_dir, steps=range(3, 5))
    running.end()
    import sqlite3

    with sqlite3.connect(tmp_path / "trackio" / "quickstart.db") as database:
        found = database.execute(
            "select step from metrics where cast(metrics as text) like '%trainer/loss%'"
        ).fetchall()
    database.close()
    assert sorted(step for (step,) in found) == [1, 2, 3, 4]


# --- every row arrives once and in order, whatever happens to a tracker or its process


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


# --- W&B and OpenTelemetry, with the real packages


def facts(run_dir: Path) -> RunFacts:
    return RunFacts(
        run_id="run 0/x", project="quickstart", directory=run_dir / "trackers", settings={"name": "quickstart"}
    )


# --- OpenTelemetry ---------------------------------------------------------------------------------------------------


class Collector:
    """A gRPC server with the two services of an OpenTelemetry collector."""

    def __init__(self, port: int = 0) -> None:
        from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics
        from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as metrics_grpc
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as trace_grpc

        self.metrics: list[Any] = []
        self.spans: list[Any] = []
        collector = self

        class Metrics(metrics_grpc.MetricsServiceServicer):
            def Export(self, request: Any, context: Any) -> Any:
                for resource in request.resource_metrics:
                    for scope in resource.scope_metrics:
                        collector.metrics += scope.metrics
                return metrics.ExportMetricsServiceResponse()

        class Trace(trace_grpc.TraceServiceServicer):
            def Export(self, request: Any, context: Any) -> Any:
                for resource in request.resource_spans:
                    for scope in resource.scope_spans:
                        collector.spans += scope.spans
                return trace.ExportTraceServiceResponse()

        self._server = grpc.server(futures.ThreadPoolExecutor(2))
        metrics_grpc.add_MetricsServiceServicer_to_server(Metrics(), self._server)
        trace_grpc.add_TraceServiceServicer_to_server(Trace(), self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self._server.start()

    def stop(self) -> None:
        self._server.stop(None).wait()


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    found = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{found.port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_INSECURE", "true")
    yield found
    found.stop()


@pytest.mark.needs("opentelemetry")
def test_a_collector_gets_gauges_with_units_and_times_and_one_trace(tmp_path: Path, collector: Collector) -> None:
    write_run(tmp_path)
    sink = OtlpSink(facts(tmp_path))
    rows = read_metrics(tmp_path)
    sink.send(rows)
    sink.close()
    by_name = {metric.name: metric for metric in collector.metrics}
    loss = by_name["rollmill.trainer.loss"]
    assert [point.as_double for point in loss.gauge.data_points] == [-0.125] * 3
    assert loss.gauge.data_points[0].time_unix_nano == int(rows[0]["time"] * 1e9)
    attributes = {pair.key: pair.value for pair in loss.gauge.data_points[1].attributes}
    assert (attributes["group"].string_value, attributes["step"].int_value) == ("model0", 2)
    assert by_name["rollmill.trainer.entropy"].unit == "nat" and by_name["rollmill.compute_s"].unit == "s"
    names = [span.name for span in collector.spans]
    assert {name: names.count(name) for name in names} == {
        "training step": 3,
        "weight transfer": 4,
        "stall": 1,
        "run": 1,
    }
    assert len({span.trace_id for span in collector.spans}) == 1
    assert len({span.span_id for span in collector.spans}) == len(collector.spans)
    root = next(span for span in collector.spans if span.name == "run")
    assert all(span.parent_span_id == root.span_id for span in collector.spans if span is not root)
    step = next(span for span in collector.spans if span.name == "training step")
    assert step.end_time_unix_nano - step.start_time_unix_nano == pytest.approx(0.25e9, abs=1e3)
    assert all(span.end_time_unix_nano >= span.start_time_unix_nano for span in collector.spans)


# --- Weights & Biases ------------------------------------------------------------------------------------------------


@pytest.mark.needs("wandb")
@pytest.mark.slow
def test_wandb_offline_has_the_scalars_under_one_id_when_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")

    for steps in (range(1, 3), range(3, 5)):  # two launches
        write_run(tmp_path, steps=steps, summary=steps.stop == 5)
        follower = Follower(tmp_path, "wandb", lambda: WandbSink(facts(tmp_path)))
        assert follower.poll()
        follower.close()
    files = sorted((tmp_path / "trackers").rglob("run-*.wandb"))
    assert {path.name for path in files} == {"run-run-0-x.wandb"}

    def written() -> int:
        return sum(path.read_bytes().count(b"model0/trainer/loss") for path in files)

    # W&B's own process may write the end of the file after `finish` has returned.
    wait_until(lambda: written() >= 4, "four steps in the files")
