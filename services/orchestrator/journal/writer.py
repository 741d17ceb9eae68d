"""The journal: what the orchestrator has acknowledged, on disk, in the order in which it was submitted.

    submit -> [queue] -> writer thread: write to segments -> sync (power) -> note in the index -> event loop: on_durable

Invariants: ``on_durable`` is called only when the records are in their segments (with ``durability: power``: synced, names
included), in submission order; nothing submitted is dropped; nothing is deleted but by ``remove_segments``. Group commit: at
most ``MAX_RECORDS`` records or ``LINGER_S`` (both well below 64 records and 20 ms). Without free disk the thread keeps what
it has, says so, and tries again: nothing is acknowledged meanwhile. JSON is encoded in the writer thread. Knows nothing about
what records mean.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import orjson
import structlog

from services.common import disk
from services.common.disk import RESERVE_BYTES
from services.common.errors import ConfigError, InfrastructureError
from services.orchestrator.journal import compaction
from services.orchestrator.journal.catching_up import log_damage
from services.orchestrator.journal.damage import Damage
from services.orchestrator.journal.files import Files
from services.orchestrator.journal.frames import MAX_NUMBER, Packer, checksum_of, write_header
from services.orchestrator.journal.index import Row
from services.orchestrator.journal.keeper import IndexKeeper
from services.orchestrator.journal.scan import numbers_in
from services.orchestrator.journal.segments import COLLECTED, SegmentWriter, first_free, segment_path, sizes_in

log = structlog.get_logger()

MAX_RECORDS = 64
LINGER_S = 0.005
RETRY_S = 0.5  # between attempts while the disk is full
CLOSE_DEADLINE_S = 10.0
REMOVE_DEADLINE_S = 60.0  # for one segment

Durability = Literal["process", "power"]  # what a record survives that was acknowledged

Encode = Callable[[], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class _Entry:
    kind: str
    key: str
    encode: Encode
    on_durable: Callable[[], None] | None


@dataclass(frozen=True, slots=True)
class _Removal:
    """Asks the writer thread to delete a segment."""

    kind: str
    segment: int
    done: Future[None]


@dataclass(frozen=True, slots=True)
class _Replacement:
    """Asks the writer thread to put what ``compaction.prepare`` wrote in the place of a segment."""

    kind: str
    segment: int
    left_out: list[tuple[int, int]]  # runs of record numbers
    done: Future[bool]


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
        files: Files | None = None,
    ) -> None:
        """Raises ``ConfigError`` for a journal of an earlier release, for one that cannot be read and for one whose records
        have numbers that no run reaches; ``CorruptDataError`` for a journal of a later release."""
        self.directory = directory
        self._segment_bytes = segment_bytes
        self._durability: Durability = durability
        self._probe = free_bytes
        self._on_failure = on_failure
        self._files = files or Files()
        self._packer = Packer()
        directory.mkdir(parents=True, exist_ok=True)
        self._index = IndexKeeper(directory)
        self.damage: list[Damage] = (
            self._index.found
        )  # that no earlier start knew of; all of it: ``JournalReader.damage``
        log_damage(self.damage, directory)
        compaction.remove_prepared(directory, self._files)
        self._next_number = self._index.last_number() + 1
        if self._next_number > MAX_NUMBER // 2:
            self._index.close()
            raise ConfigError(
                f"a record of the journal in {directory} has the number {self._next_number - 1}, which no run reaches: "
                f"find it with `millrace journal {directory.parent} list --last 1`, and take its segment away"
            )
        sizes = sizes_in(directory)
        # Every start begins new segments: what an earlier process wrote is never written to again.
        self._first_segment = first_free({segment for _, segment in sizes})
        self._names_changed = True  # in the directory since it was last synced
        if durability == "power":
            # An earlier process may have left what was not synced: from now on it counts as acknowledged.
            for place in (place for place, size in sizes.items() if size):
                self._files.sync_file(segment_path(directory, *place))
            self._files.sync_directory(directory.parent)
            self._sync_names()
        self._writers: dict[str, SegmentWriter] = {}
        self._queue: queue.SimpleQueue[_Entry | _Removal | _Replacement | None] = queue.SimpleQueue()
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

    def remove_segments(self, kind: str, segments: Iterable[int]) -> None:
        """Delete closed segments, each after a record that says so is durable. Blocking: not on the event loop.

        Raises ``InfrastructureError`` when the journal is closed, has failed or is blocked for too long.
        """
        for segment in segments:
            removal = _Removal(kind, segment, Future())
            if self._failed is not None or self._closed:
                raise InfrastructureError(f"the journal is closed: {kind}-{segment:06d} is not deleted")
            self._queue.put(removal)
            try:
                removal.done.result(REMOVE_DEADLINE_S)
            except TimeoutError:
                raise InfrastructureError(
                    f"{kind}-{segment:06d} was not deleted within {REMOVE_DEADLINE_S:g} s: {self.blocked or 'no answer'}"
                ) from None

    def withdraw(self) -> None:
        """Forget what was submitted; only before ``start``."""
        assert self._thread is None
        self._queue = queue.SimpleQueue()
        self._num_submitted = self.num_records

    def compact_segment(self, kind: str, segment: int, keep: Collection[int]) -> bool:
        """Rewrite a closed segment with the records of these numbers alone; False where that is not possible now. Blocking:
        not on the event loop.

        Raises:
            CorruptDataError: the segment has damage, and stays as it is.
            InfrastructureError: the journal is closed, has failed or is blocked for too long.
        """
        left_out = compaction.prepare(self.directory, kind, segment, keep, self._files)
        if self._failed is not None or self._closed:
            raise InfrastructureError(f"the journal is closed: {kind}-{segment:06d} is not rewritten")
        replacement = _Replacement(kind, segment, left_out, Future())
        self._queue.put(replacement)
        try:
            return replacement.done.result(REMOVE_DEADLINE_S)
        except TimeoutError:
            raise InfrastructureError(
                f"{kind}-{segment:06d} was not rewritten within {REMOVE_DEADLINE_S:g} s: {self.blocked or 'no answer'}"
            ) from None

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
                entries, after = self._collect()
                if entries:
                    self._write(entries)
                    self._notify(self._announce, entries)
                if isinstance(after, _Removal):
                    self._remove(after.kind, after.segment)
                    after.done.set_result(None)
                elif isinstance(after, _Replacement):
                    after.done.set_result(self._replace(after))
                elif after is None:
                    return
        except BaseException as error:  # noqa: BLE001 - told to the process, which stops: the disk does not work
            self._failed = error
            log.error("journal.failed", error=repr(error))
            if self._on_failure is not None:
                self._notify(self._on_failure, error)

    def _collect(self) -> tuple[list[_Entry], _Entry | _Removal | _Replacement | None]:
        """The next records, at most ``MAX_RECORDS``, and what has to be done after them: None when closing."""
        first = self._queue.get()
        if not isinstance(first, _Entry):
            return [], first
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
            if not isinstance(entry, _Entry):
                return entries, entry
            entries.append(entry)
        return entries, first

    def _write(self, entries: list[_Entry]) -> None:
        payloads = [self._packer.pack(_line(entry)) for entry in entries]
        needed = sum(map(len, payloads))
        while True:
            free = self.free_bytes()
            if free < RESERVE_BYTES + needed:
                self._block(f"{free} bytes free in {self.directory}")
            else:
                try:
                    rows = self._transaction(entries, payloads)
                    break
                except OSError as error:
                    if not disk.says_full(error):
                        raise
                    self._block(str(error))
            if self._closing.wait(RETRY_S):
                time.sleep(RETRY_S)  # closing: keep trying until the closer's deadline ends the process
        if self.blocked:
            log.info("journal.resumed", directory=str(self.directory))
            self.blocked = ""
        ends = {(kind, writer.segment): writer.size for kind, writer in self._writers.items()}
        self._index.add(rows, ends)

    def _transaction(self, entries: list[_Entry], payloads: list[bytes]) -> list[Row]:
        before: dict[str, int] = {}
        rows: list[Row] = []
        now = time.time()
        for kind in {entry.kind for entry in entries}:
            if self._writer(kind).roll_if_full():
                self._names_changed = True
        try:
            for number, (entry, payload) in enumerate(zip(entries, payloads, strict=True), start=self._next_number):
                writer = self._writers[entry.kind]
                before.setdefault(entry.kind, writer.size)
                header = write_header(number, now, entry.key, payload)
                offset = writer.size + len(header)
                writer.append(header + payload)
                rows.append(
                    Row(number, entry.kind, entry.key, writer.segment, offset, len(payload), checksum_of(payload), now)
                )
            if self._durability == "power":
                for kind in before:
                    self._writers[kind].sync()
                self._sync_names()
        except BaseException:
            for kind, size in before.items():
                self._writers[kind].undo(size)
            raise
        self._waiting_since = time.monotonic()
        self._next_number += len(rows)
        self.num_records += len(rows)
        self.num_commits += 1
        self._committed_at = time.monotonic()
        return rows

    def _remove(self, kind: str, segment: int) -> None:
        """Delete a segment; the record before says which numbers go with it."""
        runs = numbers_in(self.directory, kind, segment)
        record = {"kind": kind, "segment": segment, "numbers": runs}
        self._write([_Entry(COLLECTED, f"{kind}/{segment}", lambda: record, None)])
        self.num_records -= 1  # nobody submitted it
        self._files.remove(segment_path(self.directory, kind, segment))
        self._names_changed = True
        if self._durability == "power":
            self._sync_names()
        self._index.forget(kind, segment, runs)

    def _replace(self, wanted: _Replacement) -> bool:
        """Put a rewritten segment in place; the record before says which numbers went."""
        kind, segment = wanted.kind, wanted.segment
        if self._index.behind:
            compaction.remove_prepared(self.directory, self._files)
            return False
        record = {"kind": kind, "segment": segment, "numbers": wanted.left_out}
        self._write([_Entry(COLLECTED, f"{kind}/{segment}/part", lambda: record, None)])
        self.num_records -= 1  # nobody submitted it
        take_place = partial(compaction.take_place, self.directory, kind, segment, self._files)
        if not self._index.replace(kind, segment, take_place):
            compaction.remove_prepared(self.directory, self._files)
            return False
        self._names_changed = True
        if self._durability == "power":
            self._sync_names()
        return True

    def _sync_names(self) -> None:
        if self._names_changed:
            self._files.sync_directory(self.directory)
            self._names_changed = False

    def _writer(self, kind: str) -> SegmentWriter:
        writer = self._writers.get(kind)
        if writer is None:
            writer = SegmentWriter(self.directory, kind, self._first_segment, self._segment_bytes, self._files)
            self._writers[kind] = writer
            self._names_changed = True
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
        return {kind: writer.segment for kind, writer in self._writers.copy().items()}  # the writer thread may add one


def _line(entry: _Entry) -> bytes:
    return orjson.dumps(entry.encode(), option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)
