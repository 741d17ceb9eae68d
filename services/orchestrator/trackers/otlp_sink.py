"""OpenTelemetry over OTLP/gRPC: scalars as gauges, steps, transfers, evaluations and stalls as spans of one trace.

The exporters are the SDK's; metrics and spans are made here with the times of the rows, which its instruments cannot give.
OTEL_EXPORTER_OTLP_ENDPOINT and the other variables of the SDK say where to send to (default: http://localhost:4317).
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics.export import (
    Gauge,
    Metric,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

from services.common.records.types import TRANSFER_STAGES
from services.common.telemetry.metrics import RowKind, StallMoment, StepKey, TrainerKey
from services.common.telemetry.weight_transfers import ReportedTransfer
from services.orchestrator.metrics.scalars import Scalars, scalars_of, unit_of
from services.orchestrator.trackers.sink import Row, RunFacts, TrackerDown

SEND_TIMEOUT_S = 5
PREFIX = "rollmill."
_SCOPE = InstrumentationScope("rollmill")
_NS = 1_000_000_000


class OtlpSink:
    def __init__(self, facts: RunFacts) -> None:
        # Its errors are told by the exception that follows.
        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
        self._resource = Resource.create(
            {"service.name": "rollmill", "rollmill.run": facts.run_id, "rollmill.recipe": facts.project}
        )
        self._run_id = facts.run_id
        self._metrics = OTLPMetricExporter(timeout=SEND_TIMEOUT_S)
        self._spans = OTLPSpanExporter(timeout=SEND_TIMEOUT_S)

    def send(self, rows: Sequence[Row]) -> None:
        """Metrics, then spans: after a failure both are sent again, with the same times and span ids."""
        points = [scalars for row in rows if (scalars := scalars_of(row)) is not None]
        if points and self._metrics.export(self._data(points), SEND_TIMEOUT_S * 1000) is not MetricExportResult.SUCCESS:
            raise TrackerDown("the collector did not take the metrics")
        spans = [span for row in rows for span in self._spans_of(row)]
        if spans and self._spans.export(spans) is not SpanExportResult.SUCCESS:
            raise TrackerDown("the collector did not take the spans")

    def close(self) -> None:
        self._metrics.shutdown()
        self._spans.shutdown()

    def _data(self, points: Sequence[Scalars]) -> MetricsData:
        by_name: dict[str, list[NumberDataPoint]] = {}
        for scalars in points:
            for name, value in scalars.values.items():
                at = int(scalars.time_s * _NS)
                attributes = {"group": scalars.group, "step": scalars.step}
                by_name.setdefault(name, []).append(NumberDataPoint(attributes, at, at, value))
        metrics = [
            Metric(PREFIX + name.replace("/", "."), "", unit_of(name), Gauge(found)) for name, found in by_name.items()
        ]
        scope = ScopeMetrics(_SCOPE, metrics, "")
        return MetricsData([ResourceMetrics(self._resource, [scope], "")])

    def _spans_of(self, row: Row) -> Iterator[ReadableSpan]:
        kind = row["kind"]
        end_s = row["time"]
        if kind == RowKind.TRAINING_STEP:
            about = {"policy": row["policy"], "step": row["step"]}
            about |= {
                key: row[key]
                for key in (TrainerKey.LOSS.in_row, StepKey.ROLLOUT_REWARD_MEAN)
                if row.get(key) is not None
            }
            yield self._span("training step", end_s - row[StepKey.COMPUTE_S], end_s, about)
        elif kind == RowKind.WEIGHT_TRANSFER:
            report = ReportedTransfer.from_row(row)
            found = report.transfer
            about = {"policy": found.policy, "replica": report.replica, "version": found.version}
            about |= {"encoding": found.encoding, "transport": found.transport}
            # Encoding is at the source and may come before; the stages here follow each other from the start.
            took_s = sum(getattr(found, stage) for stage in TRANSFER_STAGES)
            begin_s = found.started_at or end_s - took_s
            yield self._span("weight transfer", begin_s, min(end_s, begin_s + took_s), about, found.error)
        elif kind == RowKind.EVALUATION:
            about = {"name": row["name"], "trajectories": row["num_trajectories"], "failed": row["num_failed"]}
            about |= {} if row["mean_reward"] is None else {"reward": row["mean_reward"]}
            yield self._span("evaluation", end_s, end_s, about)
        elif kind == RowKind.STALL and row["moment"] == StallMoment.END:
            about = {"component": row["component"], "cause": row["cause"], "detail": row["detail"]}
            yield self._span("stall", end_s - row["seconds"], end_s, about, row["cause"])
        elif kind == RowKind.SUMMARY:
            yield self._span("run", end_s - row["seconds"], end_s, {"state": row["state"]}, is_root=True)

    def _span(
        self, name: str, begin_s: float, end_s: float, about: dict[str, Any], error: str = "", is_root: bool = False
    ) -> ReadableSpan:
        seed = "run" if is_root else f"{name} {end_s!r} {sorted(about.items())}"
        return ReadableSpan(
            name=name,
            context=self._context(seed),
            parent=None if is_root else self._context("run"),
            resource=self._resource,
            attributes={
                "rollmill.run": self._run_id,
                **{f"{PREFIX}{key.replace('/', '.')}": value for key, value in about.items()},
            },
            status=Status(StatusCode.ERROR, error) if error else Status(StatusCode.OK),
            start_time=int(begin_s * _NS),
            end_time=int(end_s * _NS),
            instrumentation_scope=_SCOPE,
        )

    def _context(self, seed: str) -> SpanContext:
        """Ids that are the same whenever the row is sent: a run is one trace."""
        trace = hashlib.sha256(self._run_id.encode()).digest()
        span = hashlib.sha256(f"{self._run_id} {seed}".encode()).digest()
        return SpanContext(
            trace_id=int.from_bytes(trace[:16]), span_id=int.from_bytes(span[:8]), is_remote=False,
            trace_flags=TraceFlags(TraceFlags.SAMPLED),
        )  # fmt: skip
