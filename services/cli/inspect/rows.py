"""Rows of JSON that a run leaves behind: its metrics, its logs, its journal. Readable while they are being written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import orjson

from services.cli.inspect.run_state import check_run_directory
from services.common import run_files
from services.common.errors import ConfigError

Row = dict[str, Any]


def parse_rows(lines: Iterable[bytes]) -> Iterator[Row]:
    """A row for each valid line; the last may be incomplete during a write."""
    for line in lines:
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        if isinstance(row, dict):
            yield row


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a file, in its order."""
    with path.open("rb") as lines:
        yield from parse_rows(lines)


def read_metrics(run_dir: Path) -> list[Row]:
    """Rows of a run's metrics; raises ``ConfigError`` when the directory has none."""
    path = run_files.metrics(run_dir)
    if not path.exists():
        check_run_directory(run_dir)
        raise ConfigError(f"{run_dir} has no metrics yet: its orchestrator has not begun")
    return list(read_rows(path))
