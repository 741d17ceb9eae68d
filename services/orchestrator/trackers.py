"""Sends the metrics of a run to trackers, in a process of its own that follows ``metrics/orchestrator.jsonl``.

    ``python -m services.orchestrator.trackers --run-dir DIR``

The orchestrator starts it. Ends with the run, or on SIGTERM after a last attempt.

Invariant: a row is sent, in order, before the position of its tracker moves beyond it; so rows that a stopped tracker did
not take stay in the file and are sent later, also by another process. A process that is killed between the two sends rows
twice. The file is the queue: no row is held in memory, and the run never waits.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import orjson
import structlog

from services.common import run_files
from services.common.config.loading import load_resolved
from services.common.config.processes import Tracker, missing_packages
from services.common.config.recipe import Recipe
from services.common.records import TRANSFER_STAGES
from services.common.system.child import die_with_parent_if_asked, module_command
from services.common.system.processes import ChildProcess, end, start_logged
from services.common.telemetry import logs
from services.common.telemetry.metrics import RowKind, StallMoment, StepKey, TrainerKey
from services.common.telemetry.weight_transfers import ReportedTransfer
from services.orchestrator.metrics import Row, Scalars, scalars_of, unit_of

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricsData
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext

log = structlog.get_logger()

MODULE = "services.orchestrator.trackers"
NICENESS = 10  # the run comes first
LAST_ROWS_S = 10.0  # at the end of the run; rows that are not sent then stay for `rollmill track`
SILENT_S = 300.0  # without a row sent, or for the end of a tracker's upload
POLL_S = 5.0  # rows that are sent together cost less
MOST_BYTES = 4 * 1024 * 1024  # read at once
FIRST_DELAY_S, LONGEST_DELAY_S = 2.0, 60.0  # between two attempts at a tracker that is down
INIT_TIMEOUT_S = 30  # of W&B
SEND_TIMEOUT_S = 5  # of OpenTelemetry
PREFIX = "rollmill."  # of its names
_NS = 1_000_000_000


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


# --- one tracker -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Position:
    """How far a tracker has come, as ``RUN/trackers/<tracker>.json`` keeps it."""

    offset: int = 0
    """Bytes of the metrics file whose rows were sent."""
    num_rows: int = 0
    error: str = ""
    """Why rows wait; empty while none do."""


def position_file(run_dir: Path, tracker: str) -> Path:
    return run_files.trackers(run_dir) / f"{tracker}.json"


def read_position(run_dir: Path, tracker: str) -> Position:
    """The position of a tracker; the beginning when there is no valid file."""
    try:
        return Position(**json.loads(position_file(run_dir, tracker).read_text()))
    except (FileNotFoundError, json.JSONDecodeError, TypeError):
        return Position()


def all_sent(run_dir: Path, tracker: str) -> bool:
    """Whether a tracker has taken every row of the run's metrics."""
    metrics = run_files.metrics(run_dir)
    return not metrics.exists() or read_position(run_dir, tracker).offset >= metrics.stat().st_size


class Follower:
    def __init__(
        self,
        run_dir: Path,
        tracker: str,
        make: Callable[[], Sink],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``make`` may raise ``TrackerDown``; it is called again then."""
        self._run_dir = run_dir
        self.tracker = tracker
        self._make = make
        self._clock = clock
        self._sink: Sink | None = None
        self._position = read_position(run_dir, tracker)
        self._down_since: float | None = None
        self.ended = False
        """Whether the last row that was sent is the summary of the run."""

    @property
    def num_rows(self) -> int:
        """Rows that the tracker has taken, in earlier processes too."""
        return self._position.num_rows

    @property
    def complete(self) -> bool:
        """Whether every row of the file was sent."""
        return not self.is_down and self._position.offset >= self._size()

    def _size(self) -> int:
        metrics = run_files.metrics(self._run_dir)
        return metrics.stat().st_size if metrics.exists() else 0

    @property
    def is_down(self) -> bool:
        return self._down_since is not None

    def poll(self) -> bool:
        """Send the rows that are new; returns whether all are sent. A tracker that is down is logged once."""
        rows, end = self._read()
        if not rows:
            self._position.offset = end
            return True
        try:
            if self._sink is None:
                self._sink = self._make()
            self._sink.send(rows)
        except TrackerDown as error:
            if self._down_since is None:
                self._down_since = self._clock()
                log.warning("tracker.down", tracker=self.tracker, error=str(error))
            self._position.error = str(error)
            self._save()
            return False
        if self._down_since is not None:
            log.info("tracker.back", tracker=self.tracker, after_s=round(self._clock() - self._down_since, 1))
            self._down_since = None
        self._position = Position(end, self._position.num_rows + len(rows))
        self.ended = rows[-1].get("kind") == RowKind.SUMMARY
        self._save()
        return self.complete

    def run(self, stop: threading.Event) -> None:
        """Poll until the run has ended, or ``stop`` is set and what was there then is sent or cannot be."""
        delay_s = FIRST_DELAY_S
        while True:
            stopping = stop.is_set()
            done = self.poll()
            if (done and (stopping or self.ended)) or (stopping and self.is_down):
                break
            delay_s = min(2 * delay_s, LONGEST_DELAY_S) if self.is_down else FIRST_DELAY_S
            if done or self.is_down:
                stop.wait(delay_s if self.is_down else POLL_S)
        self.close()

    def close(self) -> None:
        if self._sink is None:
            return
        try:
            self._sink.close()
        except TrackerDown as error:
            log.warning("tracker.down", tracker=self.tracker, error=str(error))
            return
        log.info("tracker.done", tracker=self.tracker, rows=self._position.num_rows)

    def _read(self) -> tuple[Sequence[Row], int]:
        """Whole rows after the position, and the offset behind them. A line that is no row is passed over."""
        try:
            with run_files.metrics(self._run_dir).open("rb") as file:
                file.seek(self._position.offset)
                data = file.read(MOST_BYTES)
        except FileNotFoundError:
            return [], self._position.offset
        whole = data.rfind(b"\n") + 1
        rows: list[dict[str, Any]] = []
        for line in data[:whole].splitlines():
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError:
                continue
            if isinstance(row, dict) and {"time", "kind"} <= row.keys():
                rows.append(row)
        return rows, self._position.offset + whole

    def _save(self) -> None:
        path = position_file(self._run_dir, self.tracker)
        partial = path.with_suffix(".json.partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(asdict(self._position)))
            partial.replace(path)
        except OSError as error:  # a full disk: rows since then are sent twice after a restart
            log.error("tracker.position_not_written", tracker=self.tracker, error=str(error))


# --- sinks: each imports a package of its own, which takes a second ----------------------------------------------------


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
        try:
            self._run: Any = wandb.init(
                project=os.environ.get("WANDB_PROJECT") or facts.project,
                id=_wandb_id(facts.run_id),
                name=facts.run_id,
                resume="allow",
                dir=str(folder),
                mode=_wandb_mode(wandb),
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


def _wandb_mode(wandb: Any) -> Any:  # W&B checks a mode of the user's
    if mode := os.environ.get("WANDB_MODE"):
        return mode
    return "online" if wandb.api.api_key else "offline"


def _wandb_id(run_id: str) -> str:
    """W&B refuses some characters in ids, and ids beyond 64 characters."""
    return re.sub(r"[^\w-]", "-", run_id)[:64]


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


# --- the process -------------------------------------------------------------------------------------------------------


def followed(recipe: Recipe) -> list[Tracker]:
    """The trackers that need the process: TensorBoard's files are written by the orchestrator itself."""
    return [tracker for tracker in recipe.run.trackers if tracker is not Tracker.TENSORBOARD]


class TrackersProcess:
    """The orchestrator's child that sends rows. No process starts if no tracker of the recipe needs one."""

    def __init__(self, recipe: Recipe, run_dir: Path) -> None:
        self._process: ChildProcess | None = None
        if not followed(recipe):
            return
        folder = run_files.logs(run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        command = module_command(MODULE, "--run-dir", str(run_dir))
        self._process = start_logged(command, folder / "trackers.stderr", own_group=False)

    def end(self) -> None:
        """Ask for a last attempt to send all rows, wait for the attempt, then kill the process. Called after the last row."""
        if self._process is None:
            return
        self._process.terminate()
        if not end(self._process, LAST_ROWS_S):
            log.warning("trackers.late", after_s=LAST_ROWS_S)


def send_rows(run_dir: Path, stop: threading.Event) -> dict[Tracker, bool]:
    """Follow the run until its end; from ``stop`` on, only send the rows that exist. Each tracker has a thread, so that none
    waits for another. Returns whether each tracker has taken every row: False for one that hangs, after ``SILENT_S``."""
    recipe = load_resolved(run_dir)
    for line in missing_packages(followed(recipe)):
        log.error("tracker.not_installed", error=line)
    followers = {
        tracker: Follower(run_dir, tracker, sink_maker(tracker, recipe, run_dir))
        for tracker in followed(recipe)
        if not missing_packages([tracker])
    }
    threads = {
        tracker: threading.Thread(target=follower.run, args=(stop,), daemon=True)
        for tracker, follower in followers.items()
    }
    for thread in threads.values():
        thread.start()
    ended = {tracker: _has_ended(thread, followers[tracker], stop) for tracker, thread in threads.items()}
    return {tracker: ended.get(tracker, False) and followers[tracker].complete for tracker in followed(recipe)}


def _has_ended(thread: threading.Thread, follower: Follower, stop: threading.Event) -> bool:
    """Wait for the end of a follower; False when the follower sends no row for ``SILENT_S`` after ``stop``."""
    sent, since = follower.num_rows, time.monotonic()
    while thread.is_alive():
        thread.join(min(1.0, SILENT_S))
        if not stop.is_set() or follower.num_rows != sent:
            sent, since = follower.num_rows, time.monotonic()
        elif thread.is_alive() and time.monotonic() - since > SILENT_S:
            log.error("tracker.hangs", tracker=follower.tracker, silent_s=SILENT_S)
            return False
    return True


def sink_maker(tracker: Tracker, recipe: Recipe, run_dir: Path) -> Callable[[], Sink]:
    def make() -> Sink:
        facts = RunFacts(
            run_id=str(recipe.run.id),
            project=recipe.name,
            directory=run_files.trackers(run_dir),
            settings=logs.without_passwords(recipe.model_dump(mode="json")),
        )
        sinks: dict[Tracker, Callable[[RunFacts], Sink]] = {
            Tracker.WANDB: WandbSink,
            Tracker.TRACKIO: TrackioSink,
            Tracker.OTLP: OtlpSink,
        }
        return sinks[tracker](facts)

    return make


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m services.orchestrator.trackers", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True, metavar="DIR", help="the run directory")
    options = parser.parse_args()
    die_with_parent_if_asked()
    os.nice(NICENESS)
    logs.configure("trackers", options.run_dir)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    return 0 if all(send_rows(options.run_dir, stop).values()) else 1


if __name__ == "__main__":
    sys.exit(main())
