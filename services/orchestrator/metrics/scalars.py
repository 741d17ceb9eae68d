"""The scalars of a run by name, step and unit, as every tracker shows them: a function of the rows of its metrics.

A scalar belongs to a group: a policy (metrics of its training steps), ``evaluation``, ``throughput``, or
``weights/<policy>/<replica>``. Its whole name is ``<group>/<name>``. docs/trackers.md has the table.

``EventFile`` writes them for TensorBoard, without TensorBoard: an event file is a sequence of records (length, checksum,
bytes, checksum), each a small protobuf message, of which the few fields of a scalar are encoded here. The usual writers
import torch where installed, which the orchestrator must not, and bring threads of their own.
"""

from __future__ import annotations

import math
import os
import re
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.records.types import TRANSFER_STAGES
from services.common.telemetry.metrics import RowKind, ThroughputKey
from services.common.telemetry.weight_transfers import ReportedTransfer
from services.orchestrator.dispatch.evaluation_pass import kind_of

Row = Mapping[str, Any]

EVALUATION_GROUP, THROUGHPUT_GROUP, WEIGHTS_GROUP = "evaluation", "throughput", "weights"

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


def unit_of(name: str) -> str:
    """The unit of a scalar by its name without the group.

    >>> unit_of("compute_s"), unit_of("trainer/tokens_per_second"), unit_of("rollout_reward_mean")
    ('s', '{token}/s', '1')
    """
    return next((unit for pattern, unit in UNITS if re.fullmatch(pattern, name)), "1")


def scalars_of(row: Row) -> Scalars | None:
    """The scalars of a row; None for a row without any: stalls, accounts, a failed transfer, the summary."""
    makers = {
        RowKind.TRAINING_STEP: _training_step,
        RowKind.THROUGHPUT: _throughput,
        RowKind.WEIGHT_TRANSFER: _weight_transfer,
        RowKind.EVALUATION: _evaluation,
    }
    make = makers.get(row["kind"])
    if make is None or (found := make(row)) is None:
        return None
    group, step, values = found
    finite = {name: float(value) for name, value in values.items() if _is_number(value)}
    return Scalars(group=group, step=step, time_s=row["time"], values=finite)


_Found = tuple[str, int, Mapping[str, Any]]
_NO_METRIC = ("time", "kind", "policy", "step")


def _training_step(row: Row) -> _Found:
    return row["policy"], row["step"], {name: value for name, value in row.items() if name not in _NO_METRIC}


def _throughput(row: Row) -> _Found:
    return THROUGHPUT_GROUP, row.get("step", 0), {key: row.get(key) for key in ThroughputKey}


def _weight_transfer(row: Row) -> _Found | None:
    report = ReportedTransfer.from_row(row)
    found = report.transfer
    if found.error:
        return None
    values = {stage: getattr(found, stage) for stage in TRANSFER_STAGES}
    values |= {"payload_bytes": found.payload_size_bytes, "bits_per_change": found.bits_per_change}
    return f"{WEIGHTS_GROUP}/{found.policy}/{report.replica}", found.version, values


def _evaluation(row: Row) -> _Found:
    kind = kind_of(row["name"])  # one curve for each way of sampling
    values = {kind: row["mean_reward"]}
    for found in row["datasets"]:
        values[f"{kind}/{found['name']}"] = (found["mean_reward"] or {}).get("value")
        values |= {f"{kind}/{found['name']}/pass@{k}": share["value"] for k, share in found["pass_at"].items()}
    values |= {f"{kind}/{role}": reward for role, reward in row["roles"].items() if len(row["roles"]) > 1}
    return EVALUATION_GROUP, max(row["newest_versions"].values(), default=0), values


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _table() -> tuple[int, ...]:
    entries = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = (value >> 1) ^ (_POLYNOMIAL if value & 1 else 0)
        entries.append(value)
    return tuple(entries)


_TABLE = _table()


def crc32c(data: bytes) -> int:
    """
    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    value = 0xFFFFFFFF
    for byte in data:
        value = _TABLE[(value ^ byte) & 0xFF] ^ (value >> 8)
    return value ^ 0xFFFFFFFF


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


def _float32(value: float) -> float:
    """The nearest number that the file can hold."""
    return max(-_MOST, min(_MOST, value))


class EventFile:
    """Appends scalars to one event file of its own."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        now = time.time()
        name = f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{os.getpid()}"
        self._file = (directory / name).open("ab", buffering=0)
        self._write(struct.pack("<Bd", 1 << 3 | 1, now) + _bytes_field(3, b"brain.Event:2"))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """One event: field 1 is the time, 2 the step, 5 the summary with its values (1 tag, 2 simple value)."""
        summary = b"".join(
            _bytes_field(1, _bytes_field(1, tag.encode()) + struct.pack("<Bf", 2 << 3 | 5, _float32(value)))
            for tag, value in values.items()
        )
        header = struct.pack("<Bd", 1 << 3 | 1, time.time()) + _varint(2 << 3) + _varint(max(step, 0))
        self._write(header + _bytes_field(5, summary))

    def close(self) -> None:
        self._file.close()

    def _write(self, event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        self._file.write(length + struct.pack("<I", _masked(length)) + event + struct.pack("<I", _masked(event)))
