"""Records of a journal as plain rows: a JSONL or Parquet file per kind."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal

import orjson

from services.cli.inspect.journal.checks import Advance, walk
from services.cli.inspect.trace.reading import open_journal
from services.common.errors import ConfigError, CorruptDataError
from services.orchestrator.journal import records, rollouts
from services.orchestrator.journal.reader import Quarantine

ROWS_OF_A_GROUP = 1000  # of a Parquet file


def export_journal(
    run_dir: Path, output: Path, advance: Advance, *, kinds: Collection[str], form: Literal["jsonl", "parquet"]
) -> dict[Path, int]:
    """Rows written, by file. Records that cannot be read, or are set aside, are left out.

    Raises:
        ConfigError: there is no journal, ``output`` cannot be written, or pyarrow is not there.
    """
    reader = open_journal(run_dir)
    files: dict[str, Any] = {}
    counts: dict[Path, int] = {}
    try:
        aside = Quarantine.of(reader)
        output.mkdir(parents=True, exist_ok=True)
        for row, line in walk(reader, advance):
            if line is None or row in aside or (kinds and row.kind not in kinds):
                continue
            try:
                plain = _plain(row.kind, line)
            except (CorruptDataError, KeyError, TypeError, ValueError):
                continue
            if row.kind not in files:
                files[row.kind] = (_Lines if form == "jsonl" else _Table)(output / f"{row.kind}.{form}")
            files[row.kind].write(plain)
            counts[files[row.kind].path] = counts.get(files[row.kind].path, 0) + 1
    except OSError as error:
        raise ConfigError(f"{output} cannot be written ({error.strerror}): name another directory with -o") from None
    finally:
        reader.close()
        for file in files.values():
            file.close()
    return counts


def _plain(kind: str, line: bytes) -> bytes:
    if kind != records.TRAJECTORY:
        return line
    record = rollouts.plain_trajectory(orjson.loads(line))
    return orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)


class _Lines:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("wb")

    def write(self, line: bytes) -> None:
        self._file.write(line)

    def close(self) -> None:
        self._file.close()


class _Table:
    """Rows in groups; columns and types are those of the first group."""

    def __init__(self, path: Path) -> None:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            raise ConfigError("--format parquet needs pyarrow: pip install pyarrow, or write --format jsonl") from None
        self.path = path
        self._arrow = pyarrow
        self._writer: Any = None
        self._rows: list[dict[str, Any]] = []

    def write(self, line: bytes) -> None:
        self._rows.append(orjson.loads(line))
        if len(self._rows) >= ROWS_OF_A_GROUP:
            self._flush()

    def _flush(self) -> None:
        if not self._rows:
            return
        table = self._arrow.Table.from_pylist(self._rows, schema=None if self._writer is None else self._writer.schema)
        if self._writer is None:
            self._writer = self._arrow.parquet.ParquetWriter(self.path, table.schema, compression="zstd")
        self._writer.write_table(table)
        self._rows = []

    def close(self) -> None:
        self._flush()
        if self._writer is not None:
            self._writer.close()
