"""W&B, trackio and OpenTelemetry as sinks of a run's rows. Each imports a package of its own, which takes a second."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from services.common.config.processes import Tracker
from services.common.records import TRANSFER_STAGES
from services.common.telemetry.metrics import ReportedTransfer, RowKind, StallMoment, StepKey, TrainerKey
from services.orchestrator.metrics import Row, Scalars, scalars_of

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricsData
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext

INIT_TIMEOUT_S = 30  # of W&B
SEND_TIMEOUT_S = 5  # of OpenTelemetry
PREFIX = "rollmill."  # of its names
_NS = 1_000_000_000


UNITS: tuple[tuple[str, str], ...] = (
    (r".*(tokens_per_s|tokens_per_second)", "{token}/s"),
    (r".*(_s|seconds)", "s"),
    (r".*_bytes", "By"),
    (r".*_gib", "GiBy"),
    (r".*bits_per_change", "bit"),
    (r".*tflops", "TFLOP/s"),
    (r".*(entropy|mismatch\w*_abs|_kl|kl_reference)", "nat"),
    (r".*(share|_min|mfu|pass@\d+|explained_variance)", "1"),
    (r".*(response_tokens_mean|num_\w*tokens|tokens_masked|tokens_expired)", "{token}"),
    (r".*(num_sequences|num_replayed|sequences_\w+)", "{sequence}"),
    (r"(source/.*/)?(rollouts_finished|failures|timeouts|slots_cancelled|running)", "{rollout}"),
    (r".*staleness\w*", "{version}"),
)

"""Pattern of a name without its group, and its unit in UCUM as OpenTelemetry writes it; the first that matches. Any other
is a number without a unit (``1``): rewards, losses, gradient norms, counts."""


def unit_of(name: str) -> str:
    """The unit of a scalar by its name without the group.

    >>> unit_of("compute_s"), unit_of("trainer/tokens_per_second"), unit_of("rollout_reward_mean")
    ('s', '{token}/s', '1')
    """
    return next((unit for pattern, unit in UNITS if re.fullmatch(pattern, name)), "1")


class TrackerDown(Exception):
    """A tracker cannot be reached, or did not take the rows that were sent: the same rows are sent again later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What trackers show of a run beside its numbers."""

    run_id: str
    project: str
    """Name of the recipe: runs of one recipe are compared with each other."""
    directory: Path
    """The run's directory of trackers."""
    settings: Mapping[str, Any]
    """The resolved recipe, without passwords."""


class Sink(Protocol):
    def send(self, rows: Sequence[Row]) -> None:
        """Send rows of the run's metrics, in order; called again with the same rows after ``TrackerDown``."""

    def close(self) -> None:
        """Hand over what is buffered. Raises ``TrackerDown`` when that is impossible."""


class WandbSink:
    """Weights & Biases. Online with a key (WANDB_API_KEY, or ``wandb login``), else offline in ``RUN/trackers/launch-N``.

    A resumed run has the same W&B id, so its curves go on. Offline, each launch leaves one directory; ``wandb sync`` sends
    them.
    """

    def __init__(self, facts: RunFacts) -> None:
        """Raises ``TrackerDown`` when the server does not answer."""
        import wandb

        # One for each launch: W&B names directories by the second, and a second run of that name replaces the first.
        folder = facts.directory / f"launch-{1 + len(list(facts.directory.glob('launch-*')))}"
        folder.mkdir(parents=True)
        settings = wandb.Settings(
            silent=True, console="off", disable_git=True, disable_code=True, x_disable_stats=True,
            init_timeout=INIT_TIMEOUT_S,
        )  # fmt: skip
        # W&B checks a mode of the user's.
        mode: Any = os.environ.get("WANDB_MODE") or ("online" if wandb.api.api_key else "offline")
        try:
            self._run: Any = wandb.init(
                project=os.environ.get("WANDB_PROJECT") or facts.project,
                id=re.sub(r"[^\w-]", "-", facts.run_id)[:64],  # W&B refuses other characters and longer ids
                name=facts.run_id,
                resume="allow",
                dir=str(folder),
                mode=mode,
                config=dict(facts.settings),
                settings=settings,
            )
        except wandb.Error as error:
            raise TrackerDown(str(error)) from error
        self._groups: set[str] = set()

    def send(self, rows: Sequence[Row]) -> None:
        for row in rows:
            if (scalars := scalars_of(row)) is None:
                continue
            step = f"{scalars.group}/step"
            if scalars.group not in self._groups:
                self._groups.add(scalars.group)
                # Groups have steps of their own: W&B's one counter is no axis of theirs.
                self._run.define_metric(step, hidden=True)
                self._run.define_metric(f"{scalars.group}/*", step_metric=step)
            self._run.log({**scalars.tagged, step: scalars.step, "_timestamp": scalars.time_s})

    def close(self) -> None:
        self._run.finish()


class TrackioSink:
    """Trackio: a local database that ``trackio show`` displays. TRACKIO_DIR, TRACKIO_SERVER_URL and TRACKIO_SPACE_ID choose
    another place."""

    def __init__(self, facts: RunFacts) -> None:
        """Raises ``TrackerDown`` when a server is named and does not answer, or the directory cannot be written."""
        import httpx
        import trackio

        self._down = (OSError, ConnectionError, httpx.HTTPError)
        try:
            self._run = trackio.init(
                project=os.environ.get("TRACKIO_PROJECT") or facts.project,
                name=facts.run_id,
                resume="allow",
                config=dict(facts.settings),
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        except self._down as error:
            raise TrackerDown(f"{type(error).__name__}: {error}") from error

    def send(self, rows: Sequence[Row]) -> None:
        for row in rows:
            if (scalars := scalars_of(row)) is not None:
                self._run.log(scalars.tagged, step=scalars.step)

    def close(self) -> None:
        try:
            self._run.finish()
        except self._down as error:
            raise TrackerDown(f"{type(error).__name__}: {error}") from error


class OtlpSink:
    """OpenTelemetry over OTLP/gRPC: scalars as gauges, steps, transfers, evaluations and stalls as spans of one trace.

    The exporters are the SDK's; metrics and spans are made here with the times of the rows, which its instruments cannot
    give. OTEL_EXPORTER_OTLP_ENDPOINT and the other variables of the SDK say where to send to (default:
    http://localhost:4317).
    """

    def __init__(self, facts: RunFacts) -> None:
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        # Its errors are told by the exception that follows.
        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
        self._resource = Resource.create(
            {"service.name": "rollmill", "rollmill.run": facts.run_id, "rollmill.recipe": facts.project}
        )
        self._scope = InstrumentationScope("rollmill")
        self._run_id = facts.run_id
        self._metrics = OTLPMetricExporter(timeout=SEND_TIMEOUT_S)
        self._spans = OTLPSpanExporter(timeout=SEND_TIMEOUT_S)

    def send(self, rows: Sequence[Row]) -> None:
        """Metrics, then spans: after a failure both are sent again, with the same times and span ids."""
        from opentelemetry.sdk.metrics.export import MetricExportResult
        from opentelemetry.sdk.trace.export import SpanExportResult

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
        from opentelemetry.sdk.metrics.export import (
            Gauge,
            Metric,
            MetricsData,
            NumberDataPoint,
            ResourceMetrics,
            ScopeMetrics,
        )

        by_name: dict[str, list[NumberDataPoint]] = {}
        for scalars in points:
            for name, value in scalars.values.items():
                at = int(scalars.time_s * _NS)
                attributes = {"group": scalars.group, "step": scalars.step}
                by_name.setdefault(name, []).append(NumberDataPoint(attributes, at, at, value))
        metrics = [
            Metric(PREFIX + name.replace("/", "."), "", unit_of(name), Gauge(found)) for name, found in by_name.items()
        ]
        scope = ScopeMetrics(self._scope, metrics, "")
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
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import Status, StatusCode

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
            instrumentation_scope=self._scope,
        )

    def _context(self, seed: str) -> SpanContext:
        """Ids that are the same whenever the row is sent: a run is one trace."""
        from opentelemetry.trace import SpanContext, TraceFlags

        trace = hashlib.sha256(self._run_id.encode()).digest()
        span = hashlib.sha256(f"{self._run_id} {seed}".encode()).digest()
        return SpanContext(
            trace_id=int.from_bytes(trace[:16]), span_id=int.from_bytes(span[:8]), is_remote=False,
            trace_flags=TraceFlags(TraceFlags.SAMPLED),
        )  # fmt: skip


SINKS: dict[Tracker, Callable[[RunFacts], Sink]] = {
    Tracker.WANDB: WandbSink,
    Tracker.TRACKIO: TrackioSink,
    Tracker.OTLP: OtlpSink,
}
