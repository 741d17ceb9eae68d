"""The rows of a run's metrics, read on as the file grows, and only those that have the shape of their kind."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from services.cli.inspect.rows import Row, parse_rows
from services.common.telemetry.metrics import RowKind


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_SHAPES: Mapping[str, Callable[[Row], bool]] = {
    RowKind.TRAINING_STEP: lambda row: isinstance(row.get("policy"), str) and isinstance(row.get("step"), int),
    RowKind.WEIGHT_TRANSFER: lambda row: (
        isinstance(row.get("policy"), str) and isinstance(row.get("replica"), str) and _number(row.get("started_at"))
    ),
    RowKind.STALL: lambda row: isinstance(row.get("component"), str) and isinstance(row.get("moment"), str),
    RowKind.ACCOUNTS: lambda row: isinstance(row.get("shares"), dict),
    RowKind.EVALUATION: lambda row: (
        isinstance(row.get("name"), str)
        and isinstance(row.get("versions"), dict)
        and isinstance(row.get("datasets"), list)
        and _number(row.get("mean_reward"))
    ),
    RowKind.THRESHOLD: lambda row: isinstance(row.get("step"), int) and isinstance(row.get("wanted"), str),
}


def is_usable(row: Row) -> bool:
    """Whether a row has a time, a kind, and the keys that readers of its kind need."""
    kind = row.get("kind")
    return isinstance(kind, str) and _number(row.get("time")) and (kind not in _SHAPES or _SHAPES[kind](row))


class MetricsTail:
    """``rows`` of the file so far; ``look`` reads on. A file that was replaced or cut is read anew."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0
        self._inode = 0
        self.rows: list[Row] = []
        self.num_skipped = 0
        """Lines that are no row, or not one of the shape of its kind."""

    def look(self) -> bool:
        """Whether there are new rows. Raises ``OSError`` for a file that cannot be read; one that is missing is empty."""
        try:
            with self._path.open("rb") as file:
                inode, size = self._identity(file.fileno())
                if inode != self._inode or size < self._at:
                    self._at, self._inode, self.rows, self.num_skipped = 0, inode, [], 0
                file.seek(self._at)
                data = file.read()
        except FileNotFoundError:
            return False
        whole = data[: data.rfind(b"\n") + 1]  # the last line may be being written
        self._at += len(whole)
        lines = whole.splitlines()
        found = [row for row in parse_rows(lines) if is_usable(row)]
        self.num_skipped += sum(1 for line in lines if line.strip()) - len(found)
        self.rows = [*self.rows, *found] if found else self.rows  # readers keep the list that they have
        return bool(found)

    @staticmethod
    def _identity(descriptor: int) -> tuple[int, int]:
        status = os.fstat(descriptor)
        return status.st_ino, status.st_size
