"""Metrics as JSON lines: one row per fact, appended, readable while the run goes on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import orjson


class MetricsWriter:
    """Appends rows ``{"time": seconds since the epoch, "kind": ..., ...}`` to a file."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)

    def write(self, kind: str, **fields: Any) -> None:
        row = {"time": time.time(), "kind": kind, **fields}
        self._file.write(orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE))

    def close(self) -> None:
        self._file.close()
