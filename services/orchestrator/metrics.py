"""Metrics of the run: rows in ``metrics/orchestrator.jsonl``, scalars for TensorBoard and trackers, ``summary.json``, the
overlap of computing and generating, and the forecast of a full disk.

The files are for users: the journal can produce them again, and the run does not read them. On a full disk rows are
dropped, counted and logged once; the run continues.
"""

from __future__ import annotations

import math
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import linear_regression
from typing import TYPE_CHECKING, Any

import orjson
import structlog

from services.common import run_files
from services.common.records import TRANSFER_STAGES, Interval, WeightTransfer
from services.common.telemetry.metrics import (
    EvaluationSummary,
    MetricsWriter,
    ReportedTransfer,
    RowKind,
    StallMoment,
    ThroughputKey,
)
from services.orchestrator.evaluation import kind_of

if TYPE_CHECKING:
    from services.orchestrator.journal.entries import EvaluationResult

log = structlog.get_logger()


def evaluation_values(result: EvaluationResult, items: bool = False) -> EvaluationSummary:
    """An evaluation as plain JSON without its name; with ``items`` also the reward of each item."""
    values = {name: value for name, value in asdict(result).items() if name != "name"}
    for found in values["datasets"]:
        found["pass_at"] = {str(passed["k"]): passed["share"] for passed in found["pass_at"]}
        if not items:
            del found["item_rewards"]
    return values


class RunMetrics:
    def __init__(self, run_dir: Path, *, tensorboard: bool = True) -> None:
        self._run_dir = run_dir
        self._rows = MetricsWriter(run_files.metrics(run_dir))
        self.num_dropped = 0
        self._board = EventFile(run_files.tensorboard(run_dir)) if tensorboard else None

    def row(self, kind: RowKind, /, **values: Any) -> None:
        """Append a row, and its scalars to TensorBoard's file."""
        try:
            row = self._rows.write(kind, **values)
            scalars = scalars_of(row)
            if scalars is not None and self._board is not None:
                self._board.scalars(scalars.step, scalars.tagged)
        except OSError as error:
            if not self.num_dropped:
                log.error("metrics.dropped", error=str(error))
            self.num_dropped += 1

    def training_step(self, policy: str, step: int, values: Mapping[str, float]) -> None:
        self.row(RowKind.TRAINING_STEP, policy=policy, step=step, **values)

    def weight_transfer(self, replica_id: str, transfer: WeightTransfer) -> None:
        self.row(RowKind.WEIGHT_TRANSFER, replica=replica_id, **asdict(transfer))

    def stall(self, moment: StallMoment, component: str, cause: str, detail: str, seconds: float) -> None:
        """``seconds`` since the begin of the stall."""
        self.row(RowKind.STALL, moment=moment, component=component, cause=cause, detail=detail, seconds=seconds)

    def evaluation(self, result: EvaluationResult) -> None:
        self.row(RowKind.EVALUATION, name=result.name, **evaluation_values(result, items=True))

    def summary(self, summary: Mapping[str, Any]) -> None:
        """Written again by a restart when missing. The row has the shares of time under the key of the accounts."""
        self.row(RowKind.SUMMARY, **{"shares" if key == "time" else key: value for key, value in summary.items()})
        target = run_files.summary(self._run_dir)
        partial = target.with_suffix(".json.partial")
        try:
            partial.write_bytes(orjson.dumps(summary, option=orjson.OPT_INDENT_2))
            partial.replace(target)
        except OSError as error:
            log.error("summary.not_written", error=str(error))

    def close(self) -> None:
        self._rows.close()
        if self._board is not None:
            self._board.close()


# --- scalars -----------------------------------------------------------------------------------------------------------

# A scalar belongs to a group: a policy (metrics of its training steps), ``evaluation``, ``throughput``, or
# ``weights/<policy>/<replica>``. Its whole name is ``<group>/<name>``. docs/trackers.md has the table.

Row = Mapping[str, Any]

_MOST = 3.4028234663852886e38  # of a float32
_POLYNOMIAL = 0x82F63B78  # CRC-32C (Castagnoli), reflected


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalars:
    """Numbers of one group at one step.

    Example: ``Scalars(group="model0", step=7, time_s=1767225600.0, values={"trainer/loss": -0.02})``.
    """

    group: str
    step: int
    """A training step; of weights the version, of throughput the newest step of any policy."""
    time_s: float
    """Since the epoch."""
    values: Mapping[str, float]
    """By name without the group; finite."""

    @property
    def tagged(self) -> dict[str, float]:
        """By whole name."""
        return {f"{self.group}/{name}": value for name, value in self.values.items()}


def scalars_of(row: Row) -> Scalars | None:
    """The scalars of a row; None for a row without any: stalls, accounts, a failed transfer, the summary."""
    values: Mapping[str, Any]
    match row["kind"]:
        case RowKind.TRAINING_STEP:
            group, step = row["policy"], row["step"]
            values = {name: value for name, value in row.items() if name not in _NO_METRIC}
        case RowKind.THROUGHPUT:
            group, step, values = "throughput", row.get("step", 0), {key: row.get(key) for key in ThroughputKey}
        case RowKind.WEIGHT_TRANSFER:
            report = ReportedTransfer.from_row(row)
            if (found := report.transfer).error:
                return None
            group, step = f"weights/{found.policy}/{report.replica}", found.version
            values = {stage: getattr(found, stage) for stage in TRANSFER_STAGES}
            values |= {"payload_bytes": found.payload_size_bytes, "bits_per_change": found.bits_per_change}
        case RowKind.EVALUATION:
            group, step = "evaluation", max(row["newest_versions"].values(), default=0)
            kind = kind_of(row["name"])  # one curve for each way of sampling
            values = {kind: row["mean_reward"]}
            for score in row["datasets"]:
                values[f"{kind}/{score['name']}"] = (score["mean_reward"] or {}).get("value")
                values |= {f"{kind}/{score['name']}/pass@{k}": share["value"] for k, share in score["pass_at"].items()}
            values |= {f"{kind}/{role}": reward for role, reward in row["roles"].items() if len(row["roles"]) > 1}
        case _:
            return None
    finite = {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    }
    return Scalars(group=group, step=step, time_s=row["time"], values=finite)


_NO_METRIC = ("time", "kind", "policy", "step")


def crc32c(data: bytes) -> int:
    """
    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    value = 0xFFFFFFFF
    for byte in data:
        value = _OF_BYTE[(value ^ byte) & 0xFF] ^ (value >> 8)
    return value ^ 0xFFFFFFFF


def _checksum_of(byte: int) -> int:
    for _ in range(8):
        byte = (byte >> 1) ^ (_POLYNOMIAL if byte & 1 else 0)
    return byte


_OF_BYTE = tuple(map(_checksum_of, range(256)))


def _masked(data: bytes) -> int:
    """As event files store checksums: rotated and offset."""
    value = crc32c(data)
    return (((value >> 15) | (value << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _bytes_field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


class EventFile:
    """Appends scalars to one event file of its own, for TensorBoard and without it.

    An event file is a sequence of records (length, checksum, bytes, checksum), each a small protobuf message, of which the
    few fields of a scalar are encoded here. tensorboardX imports torch where that is installed: 3 to 5 s.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        now = time.time()
        name = f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{os.getpid()}"
        self._file = (directory / name).open("ab", buffering=0)
        self._write(struct.pack("<Bd", 1 << 3 | 1, now) + _bytes_field(3, b"brain.Event:2"))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """One event: field 1 is the time, 2 the step, 5 the summary with its values (1 tag, 2 simple value)."""
        summary = b"".join(
            _bytes_field(
                1, _bytes_field(1, tag.encode()) + struct.pack("<Bf", 2 << 3 | 5, max(-_MOST, min(_MOST, value)))
            )
            for tag, value in values.items()
        )
        header = struct.pack("<Bd", 1 << 3 | 1, time.time()) + _varint(2 << 3) + _varint(max(step, 0))
        self._write(header + _bytes_field(5, summary))

    def close(self) -> None:
        self._file.close()

    def _write(self, event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        self._file.write(length + struct.pack("<I", _masked(length)) + event + struct.pack("<I", _masked(event)))


# --- overlap of computing and generating -------------------------------------------------------------------------------

LIVE_S = 120.0
LONGEST_STEP_S = 3600.0


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint, in order.

    >>> merge([(3, 4), (0, 2), (1, 3)])
    [(0, 4)]
    """
    merged: list[Interval] = []
    for begin, end in sorted(i for i in intervals if i[1] > i[0]):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def clip(intervals: Iterable[Interval], begin: float, end: float) -> list[Interval]:
    return [(max(b, begin), min(e, end)) for b, e in intervals if e > begin and b < end]


def length(intervals: Iterable[Interval]) -> float:
    """Of disjoint intervals."""
    return sum(end - begin for begin, end in intervals)


class Timeline:
    """Overlap of trainers' compute time and replicas' token generation.

    Works on intervals of wall-clock time from the reports of peers. Intervals older than ``LIVE_S`` are folded into totals,
    so a long run keeps little. A trainer reports a step at its end: the time since the last reported step of each policy
    stays, up to ``LONGEST_STEP_S``. The caller passes the time in.
    """

    def __init__(self) -> None:
        self._compute: dict[str, list[Interval]] = {}  # by policy
        self._emission: list[Interval] = []  # of any replica
        self._computed_until: dict[str, float] = {}  # by policy
        self._settled_until = 0.0
        self._compute_s = 0.0  # settled
        self._overlap_s = 0.0

    def totals(self) -> dict[str, float]:
        """Input of ``restore``; includes the intervals that are still live."""
        compute, both = self._live(float("inf"))
        return {"compute_s": self._compute_s + compute, "overlap_s": self._overlap_s + both}

    def restore(self, totals: Mapping[str, float]) -> None:
        self._compute_s = totals.get("compute_s", 0.0)
        self._overlap_s = totals.get("overlap_s", 0.0)

    def computed(self, policy: str, intervals: Iterable[Interval]) -> None:
        found = clip(intervals, self._settled_until, float("inf"))
        self._compute[policy] = merge([*self._compute.get(policy, []), *found])
        self._computed_until[policy] = max([self._computed_until.get(policy, 0.0), *(end for _, end in found)])

    def emitted(self, intervals: Iterable[Interval]) -> None:
        self._emission = merge([*self._emission, *clip(intervals, self._settled_until, float("inf"))])

    @property
    def overlap_share(self) -> float:
        """Share of the trainers' compute time in which some replica emitted tokens; 0 without compute time."""
        totals = self.totals()
        return totals["overlap_s"] / totals["compute_s"] if totals["compute_s"] else 0.0

    def settle(self, now: float) -> None:
        """Fold old intervals into the totals; later reports about that time do not count."""
        reported = min(self._computed_until.values(), default=0.0)
        until = max(min(now - LIVE_S, reported), now - LONGEST_STEP_S)
        if until <= self._settled_until:
            return
        compute, both = self._live(until)
        self._compute_s += compute
        self._overlap_s += both
        self._settled_until = until
        self._compute = {policy: clip(found, until, float("inf")) for policy, found in self._compute.items()}
        self._emission = clip(self._emission, until, float("inf"))

    def _live(self, until: float) -> tuple[float, float]:
        compute = [interval for found in self._compute.values() for interval in clip(found, 0.0, until)]
        return length(compute), sum(length(clip(self._emission, begin, end)) for begin, end in compute)


# --- free disk ---------------------------------------------------------------------------------------------------------

SAMPLE_S = 10.0
WINDOW_S = 1800.0
LEAST_SAMPLES_S = 120.0  # of samples, before the first forecast
LEAST_CHECKPOINTS = 2
LITTLE_BYTES = 1 << 30  # less, or less than the run has written, is little


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskOutlook:
    """Disk state of a run; ``full_in_s`` is None while the run does not grow, or samples are missing."""

    free_bytes: int
    run_bytes: int
    bytes_per_s: float = 0.0
    full_in_s: float | None = None


class DiskForecast:
    """Forecasts when the disk will be full, from the growth of the run directory over a window.

    every SAMPLE_S: (time, bytes of the run) -> least squares over WINDOW_S -> seconds until min_free_bytes

    Only the run's own bytes count: other programs come and go. The window begins when the run has written the checkpoints
    that it keeps, which is a large growth that ends; with little free space it begins at once.
    """

    def __init__(self, reserve_bytes: int, checkpoints: int = LEAST_CHECKPOINTS) -> None:
        """``reserve_bytes``: with less free space the run issues no task groups, so this counts as full.
        ``checkpoints``: that the run keeps, of all policies."""
        self._reserve_bytes = reserve_bytes
        self._awaited = max(LEAST_CHECKPOINTS, checkpoints)
        self._checkpoint: int | None = None  # the newest
        self._samples: deque[tuple[float, int]] = deque()  # (when, bytes of the run)
        self.outlook: DiskOutlook | None = None  # of the newest sample; None before the first

    def note(self, now: float, free_bytes: int, run_bytes: int, checkpoint: int = 0) -> DiskOutlook:
        """Add a sample; returns the disk state, which is ``outlook`` until the next sample. ``checkpoint`` changes with
        every written checkpoint."""
        if self._awaited and self._checkpoint not in (None, checkpoint):
            self._awaited -= 1
            if not self._awaited:
                self._samples.clear()
        self._checkpoint = checkpoint
        self._samples.append((now, run_bytes))
        while now - self._samples[0][0] > WINDOW_S:
            self._samples.popleft()
        self.outlook = self._outlook(now, free_bytes, run_bytes)
        return self.outlook

    def _outlook(self, now: float, free_bytes: int, run_bytes: int) -> DiskOutlook:
        times = [when for when, _ in self._samples]
        left = max(0, free_bytes - self._reserve_bytes)
        if now - times[0] < LEAST_SAMPLES_S or (self._awaited and left > max(LITTLE_BYTES, run_bytes)):
            return DiskOutlook(free_bytes=free_bytes, run_bytes=run_bytes)
        rate = max(linear_regression(times, [used for _, used in self._samples]).slope, 0.0)
        full_in_s = left / rate if rate > 0 else None if left else 0.0
        return DiskOutlook(free_bytes=free_bytes, run_bytes=run_bytes, bytes_per_s=rate, full_in_s=full_in_s)


def bytes_below(directory: Path) -> int:
    """Bytes on disk of all files below a directory, without files that vanish meanwhile or cannot be read."""
    total = 0
    waiting = [str(directory)]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                found = list(entries)
        except OSError:
            continue
        for entry in found:
            try:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                else:
                    total += 512 * entry.stat(follow_symlinks=False).st_blocks
            except OSError:
                continue
    return total
