"""Measures what trackers cost a training step: W&B (offline), trackio, OpenTelemetry (a collector here) and TensorBoard.

A step of the quickstart writes a row of the step, one of a weight transfer and, every few steps, one of throughput. This
script replays such rows, made by the real recorder, at a quarter of a second each, twice as fast as the quickstart
trains, and measures

    process_ms_per_step    processor milliseconds of the trackers' process and its children, between its start and its end
    recorder_ms_per_step   of the orchestrator's recorder with TensorBoard, less without it
    start_s, end_s         processor seconds of the process until its first rows are sent (imports, W&B's own process), and
                           after the last ones
    overhead               both per step, divided by the seconds of a step of the quickstart (``STEP_S``): at most 0.01
    sent                   rows that every tracker took, of so many written

The run never waits for the process, so processor time is all that it takes. A tracker that is not installed is named in
``left_out``.

    python benchmarks/trackers.py [--quick] [--steps 120]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from concurrent import futures
from pathlib import Path
from typing import Any

from benchmarks._process_tree import all_processes
from benchmarks._report import report_facts
from services.common.config.loading import load_recipe, save_resolved
from services.common.config.processes import Tracker, missing_packages
from services.common.records import WeightTransfer
from services.common.system.child import module_command
from services.orchestrator.metrics import RunMetrics
from services.orchestrator.trackers import read_position

ROOT = Path(__file__).resolve().parent.parent
STEP_S = 0.5  # of the quickstart on two cores; those of larger models are longer
EVERY_S = 0.25  # between two steps here
NUM_METRICS = 75  # of a step
THROUGHPUT_EVERY = 10  # steps
WARM_UP = 12  # steps
SETTLE_S = 1.0  # for threads of the packages that write what they were given


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="40 steps")
    parser.add_argument("--steps", type=int, default=120)
    options = parser.parse_args()
    steps = 40 if options.quick else options.steps
    left_out = {str(tracker): line for tracker in Tracker for line in missing_packages([tracker])}
    trackers = [tracker for tracker in Tracker if str(tracker) not in left_out]
    with tempfile.TemporaryDirectory(prefix="rollmill-trackers-") as scratch:
        start_s, process_s, end_s, sent, written = _follow(Path(scratch), trackers, steps)
        recorder_s = _recorder(Path(scratch), steps)
    per_step = process_s / steps + recorder_s
    report_facts(
        "trackers",
        trackers=[str(tracker) for tracker in trackers],
        overhead=per_step / STEP_S,
        process_ms_per_step=1000 * process_s / steps,
        recorder_ms_per_step=1000 * recorder_s,
        start_s=start_s,
        end_s=end_s,
        sent=sent,
        written=written,
        step_s=STEP_S,
        left_out=left_out,
    )


def _follow(scratch: Path, trackers: list[Tracker], steps: int) -> tuple[float, float, float, int, int]:
    """Processor seconds of the process until the warm-up is sent, from then until everything is sent, and to its end; the
    fewest rows that a tracker took, and the rows written."""
    run_dir = scratch / "run0"
    run_dir.mkdir()
    recipe = load_recipe(ROOT / "recipes" / "quickstart", [f"run.trackers=[{','.join(trackers)}]", "run.id=run0"])
    save_resolved(recipe, run_dir)
    collector = _collector() if Tracker.OTLP in trackers else None
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "WANDB_MODE": "offline", "TRACKIO_DIR": str(scratch / "trackio"),
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector[1] if collector else 1}",
    }  # fmt: skip
    metrics = RunMetrics(run_dir)
    with (scratch / "output").open("wb") as output:
        process = subprocess.Popen(
            module_command("extras.trackers.follow", "--run-dir", str(run_dir)),
            env=environment,
            stdout=output,
            stderr=output,
        )
    meter = _Meter(process.pid)
    written = _write(metrics, range(WARM_UP), EVERY_S)
    followed = [tracker for tracker in trackers if tracker is not Tracker.TENSORBOARD]
    _wait(lambda: all(read_position(run_dir, tracker).num_rows == written for tracker in followed))
    time.sleep(SETTLE_S)
    start_s = meter.seconds
    written += _write(metrics, range(WARM_UP, WARM_UP + steps), EVERY_S)
    _wait(lambda: all(read_position(run_dir, tracker).num_rows == written for tracker in followed))
    time.sleep(SETTLE_S)
    used_s = meter.seconds - start_s
    metrics.summary({"run_id": "run0", "state": "finished", "seconds": 1.0})
    process.wait(60.0)
    end_s = meter.stop() - start_s - used_s
    if collector is not None:
        collector[0].stop(None)
    return start_s, used_s, end_s, min((read_position(run_dir, t).num_rows for t in followed), default=0), written + 1


def _write(metrics: RunMetrics, steps: range, every_s: float) -> int:
    """Rows like those of the quickstart; returns their number."""
    values = {f"trainer/metric_{number}": number / 7 for number in range(NUM_METRICS)} | {"compute_s": 0.2}
    num_rows = 0
    for step in steps:
        metrics.training_step("model0", step, values)
        metrics.weight_transfer(
            "a", WeightTransfer(policy="model0", version=step, num_changes=1, started_at=time.time())
        )
        num_rows += 2
        if step % THROUGHPUT_EVERY == 0:
            metrics.throughput(step, [], {"tokens_per_s": 5000.0})
            num_rows += 1
        time.sleep(every_s)
    return num_rows


def _recorder(scratch: Path, steps: int) -> float:
    """Processor seconds that TensorBoard adds to the recorder, per step."""
    used = {}
    for tensorboard in (False, True):
        metrics = RunMetrics(scratch / f"recorder-{tensorboard}", tensorboard=tensorboard)
        begin = time.thread_time()
        _write(metrics, range(steps), 0.0)
        used[tensorboard] = time.thread_time() - begin
        metrics.close()
    return max(0.0, used[True] - used[False]) / steps


class _Meter:
    """Processor seconds of a process and its descendants, the ended ones as far as they were seen every 50 ms."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._seen: dict[int, float] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def seconds(self) -> float:
        return sum(self._seen.values())

    def stop(self) -> float:
        self._stop.set()
        self._thread.join()
        return self.seconds

    def _run(self) -> None:
        while not self._stop.wait(0.05):
            processes = all_processes()
            for pid, times in processes.items():
                if self._is_descendant(pid, processes):
                    self._seen[pid] = times.own_s

    def _is_descendant(self, pid: int, processes: dict[int, Any]) -> bool:
        while pid in processes and pid > 1:
            if pid == self._pid or pid in self._seen:
                return True
            pid = processes[pid].parent
        return False


def _collector() -> tuple[Any, int]:
    """A gRPC server that takes metrics and spans like a collector, and its port."""
    import grpc
    from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

    class Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            return metrics_service_pb2.ExportMetricsServiceResponse()

    class Trace(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            return trace_service_pb2.ExportTraceServiceResponse()

    server = grpc.server(futures.ThreadPoolExecutor(2))
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(Metrics(), server)
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Trace(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    return server, port


def _wait(condition: Any, limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            sys.exit(f"the trackers have not taken the first rows within {limit_s:g} s")
        time.sleep(0.1)


if __name__ == "__main__":
    main()
