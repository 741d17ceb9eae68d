"""The journal: what the orchestrator has acknowledged, on disk, in the order in which it was submitted.

    submit -> [queue] -> writer thread: write lines -> commit index rows -> event loop: on_durable callbacks

Invariants: ``on_durable`` is called only after the rows are committed, in submission order; nothing submitted is
dropped. Group commit: at most ``MAX_RECORDS`` records or ``LINGER_S`` (both well below 64 records and 20 ms).
Without free disk the thread keeps what it has, says so, and tries again: nothing is acknowledged meanwhile.
JSON is encoded in the writer thread. Knows nothing about what records mean.
"""

from __future__ import annotations

import asyncio
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import structlog

from services.common import disk
from services.common.disk import RESERVE_BYTES
from services.common.errors import InfrastructureError
from services.orchestrator.journal.index import INDEX_FILE, Durability, Index, Row, checksum_of
from services.orchestrator.journal.segments import SegmentWriter, cut_tails, segments_in

log = structlog.get_logger()

MAX_RECORDS = 64
LINGER_S = 0.005
RETRY_S = 0.5  # between attempts while the disk is full
CLOSE_DEADLINE_S = 10.0

Encode = Callable[[], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class _Entry:
    kind: str
    key: str
    encode: Encode
    on_durable: Callable[[], None] | None


class Journal:
    """Open it on the event loop that shall get the callbacks."""

    def __init__(
        self,
        directory: Path,
        *,
        segment_bytes: int = 64 * 1024 * 1024,
        durability: Durability = "process",
        free_bytes: Callable[[Path], int] = disk.free_bytes,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        self.directory = directory
        self._segment_bytes = segment_bytes
        self._durability: Durability = durability
        self._probe = free_bytes
        self._on_failure = on_failure
        directory.mkdir(parents=True, exist_ok=True)
        self._index = Index(self._index_path, durability)
        self.bytes_cut = cut_tails(directory, self._index.ends())
        self._next_number = self._index.last_number() + 1
        # Every start begins new segments: what an earlier process wrote is never written to again.
        self._first_segment = max((segment for _, segment in segments_in(directory)), default=0) + 1
        self._writers: dict[str, SegmentWriter] = {}
        self._queue: queue.SimpleQueue[_Entry | None] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._failed: BaseException | None = None
        self._closing = threading.Event()
        self._closed = False
        self.blocked = ""  # why nothing is being written; empty while all is well
        self.num_commits = 0
        self._committed_at = 0.0
        self.num_records = 0
        self._num_submitted = 0
        self._waiting_since = 0.0  # the last write, or when the first record came after it

    @property
    def _index_path(self) -> Path:
        return self.directory / INDEX_FILE

    def start(self) -> None:
        """Begin to write; callbacks go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def submit(self, kind: str, key: str, encode: Encode, on_durable: Callable[[], None] | None = None) -> None:
        """Queue a record. ``encode`` is called in the writer thread and must not read what may still change."""
        if self._failed is not None:
            raise InfrastructureError(f"the journal has failed: {self._failed}")
        if self._num_submitted == self.num_records:
            self._waiting_since = time.monotonic()
        self._num_submitted += 1
        self._queue.put(_Entry(kind, key, encode, on_durable))

    def append(
        self, kind: str, key: str, encode: Encode, apply: Callable[[], None] | None = None
    ) -> asyncio.Future[None]:
        """Queue a record; the future is done when it is durable. ``apply`` runs just before, in submission order."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def durable() -> None:
            if apply is not None:
                apply()
            if not future.done():
                future.set_result(None)

        self.submit(kind, key, encode, durable)
        return future

    def withdraw(self) -> None:
        """Forget what was submitted; only before ``start``."""
        assert self._thread is None
        self._queue = queue.SimpleQueue()
        self._num_submitted = self.num_records

    @property
    def waiting_s(self) -> float:
        """How long records have waited without any being written; 0 when none waits."""
        return time.monotonic() - self._waiting_since if self._num_submitted > self.num_records else 0.0

    def free_bytes(self) -> int:
        return self._probe(self.directory)

    async def close(self) -> None:
        """Write what is queued and stop. Gives up after a deadline when the disk is full: nothing of it was promised.
        Closing twice is fine."""
        if self._closed:
            return
        self._closed = True
        if self._thread is not None:
            self._closing.set()
            self._queue.put(None)
            await asyncio.to_thread(self._thread.join, CLOSE_DEADLINE_S)
            if self._thread.is_alive():
                log.warning("journal.close_deadline", waited_s=CLOSE_DEADLINE_S, blocked=self.blocked)
                return
        for writer in self._writers.values():
            writer.close()
        self._index.close()

    # --- the writer thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                entries, more = self._collect()
                if entries:
                    self._write(entries)
                    self._notify(self._announce, entries)
                if not more:
                    return
        except BaseException as error:  # noqa: BLE001 - told to the process, which stops: the disk does not work
            self._failed = error
            log.error("journal.failed", error=repr(error))
            if self._on_failure is not None:
                self._notify(self._on_failure, error)

    def _collect(self) -> tuple[list[_Entry], bool]:
        """The next records, at most ``MAX_RECORDS``; False when closing."""
        first = self._queue.get()
        if first is None:
            return [], False
        # A lone record is committed at once; in a stream of them, commits are at least LINGER_S apart.
        linger_s = self._committed_at + LINGER_S - time.monotonic()
        if linger_s > 0 and self._queue.qsize() < MAX_RECORDS - 1 and not self._closing.is_set():
            time.sleep(linger_s)
        entries = [first]
        while len(entries) < MAX_RECORDS:
            try:
                entry = self._queue.get_nowait()
            except queue.Empty:
                break
            if entry is None:
                return entries, False
            entries.append(entry)
        return entries, True

    def _write(self, entries: list[_Entry]) -> None:
        lines = [
            orjson.dumps(e.encode(), option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE) for e in entries
        ]
        needed = sum(map(len, lines))
        while True:
            free = self.free_bytes()
            if free < RESERVE_BYTES + needed:
                self._block(f"{free} bytes free in {self.directory}")
            else:
                try:
                    self._transaction(entries, lines)
                    break
                except (OSError, sqlite3.OperationalError) as error:
                    if not disk.says_full(error):
                        raise
                    self._block(str(error))
            if self._closing.wait(RETRY_S):
                time.sleep(RETRY_S)  # closing: keep trying until the closer's deadline ends the process
        if self.blocked:
            log.info("journal.resumed", directory=str(self.directory))
            self.blocked = ""

    def _transaction(self, entries: list[_Entry], lines: list[bytes]) -> None:
        before: dict[str, int] = {}
        rows: list[Row] = []
        now = time.time()
        for kind in {entry.kind for entry in entries}:
            self._writer(kind).roll_if_full()
        try:
            for number, (entry, line) in enumerate(zip(entries, lines, strict=True), start=self._next_number):
                writer = self._writers[entry.kind]
                before.setdefault(entry.kind, writer.size)
                checksum = checksum_of(line)
                rows.append(Row(number, entry.kind, entry.key, writer.segment, writer.size, len(line), checksum, now))
                writer.append(line)
            if self._durability == "power":
                for kind in before:
                    self._writers[kind].sync()
            self._index.append(rows)
        except BaseException:
            for kind, size in before.items():
                self._writers[kind].undo(size)
            raise
        self._waiting_since = time.monotonic()
        self._next_number += len(rows)
        self.num_records += len(rows)
        self.num_commits += 1
        self._committed_at = time.monotonic()

    def _writer(self, kind: str) -> SegmentWriter:
        writer = self._writers.get(kind)
        if writer is None:
            writer = SegmentWriter(self.directory, kind, self._first_segment, self._segment_bytes)
            self._writers[kind] = writer
            if self._durability == "power":
                _sync_directory(self.directory)
        return writer

    def _block(self, reason: str) -> None:
        if not self.blocked:
            log.error("journal.no_free_disk", reason=reason, effect="nothing is acknowledged until there is space")
        self.blocked = reason

    def _announce(self, entries: list[_Entry]) -> None:
        for entry in entries:
            if entry.on_durable is not None:
                entry.on_durable()

    def _notify(self, callback: Callable[..., None], *args: Any) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:  # the loop is closed: the process is leaving, and nobody waits for this any more
            log.debug("journal.loop_closed")

    def current_segments(self) -> dict[str, int]:
        """The segment of each kind that is being written; earlier ones never change again."""
        return {kind: writer.segment for kind, writer in self._writers.items()}


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
