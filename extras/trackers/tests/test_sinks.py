"""W&B, trackio and OpenTelemetry get the rows, with the real packages; OTLP with a real collector."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

from extras.trackers.follow import Follower
from extras.trackers.sinks import OtlpSink, RunFacts, WandbSink
from services.cli.inspect.run_state import read_metrics
from tests.unit.orchestrator.metrics_rows import write_run
from tests.waiting import wait_until


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
