"""Writes the journal: every record that the orchestrator has acknowledged, on disk, in submission order.

    submit -> [queue] -> writer thread: write to segments -> sync (power) -> event loop: on_durable; index, soon

Invariants: ``on_durable`` is called only when the records are in their segments (with ``durability: power``: synced,
names included), in submission order. The writer drops no submitted record and deletes only through ``remove_segments``.
Group commit: at most ``MAX_RECORDS`` records or ``LINGER_S`` (below 20 ms); a record that a caller awaits ends the
lingering. On a full disk the thread keeps its records, logs the state and retries: no record is acknowledged meanwhile,
but ``remove_segments`` still deletes segments, and its record may use the last reserved bytes. The writer thread
encodes JSON. Independent of the meaning of records.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import structlog

from services.common.errors import ConfigError, InfrastructureError
from services.common.system import machine
from services.common.system.machine import RESERVE_BYTES
from services.orchestrator.journal.index import IndexKeeper, log_damage
from services.orchestrator.journal.segments import (
    COLLECTED,
    MAX_NUMBER,
    Damage,
    Durability,
    Files,
    Packer,
    Row,
    SegmentSet,
    numbers_in,
)

log = structlog.get_logger()

MAX_RECORDS = 64
LINGER_S = 0.01
RETRY_S = 0.5  # between attempts while the disk is full
CLOSE_DEADLINE_S = 10.0
REMOVE_DEADLINE_S = 60.0  # for one segment

Encode = Callable[[], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class _Entry:
    kind: str
    key: str
    encode: Encode
    on_durable: Callable[[], None] | None


@dataclass(frozen=True, slots=True)
class _Removal:
    """Request to the writer thread: delete a segment."""

    kind: str
    segment: int
    done: Future[None]


class Journal:
    """Open the journal on the event loop that receives the callbacks."""

    def __init__(
        self,
        directory: Path,
        *,
        segment_bytes: int = 64 * 1024 * 1024,
        durability: Durability = "process",
        on_failure: Callable[[BaseException], None] | None = None,
        files: Files | None = None,
    ) -> None:
        """Raises ``ConfigError`` for an unreadable journal or impossible record numbers, ``CorruptDataError`` for a journal of
        a later release."""
        self.directory = directory
        self._on_failure = on_failure
        self._files = files or Files()
        self._packer = Packer()
        directory.mkdir(parents=True, exist_ok=True)
        self._index = IndexKeeper(directory)
        # Damage that no earlier start reported; ``JournalReader.damage`` has all.
        self.damage: list[Damage] = self._index.found
        log_damage(self.damage, directory)
        next_number = self._index.last_number() + 1
        if next_number > MAX_NUMBER // 2:
            self._index.close()
            raise ConfigError(
                f"a record of the journal in {directory} has the number {next_number - 1}, which no run reaches: "
                f"find it with `rollmill journal {directory.parent} list --last 1`, and take its segment away"
            )
        self._segments = SegmentSet(
            directory, next_number=next_number, segment_bytes=segment_bytes, durability=durability, files=self._files
        )
        self._queue: queue.SimpleQueue[_Entry | None] = queue.SimpleQueue()  # None: a removal waits, or the end
        self._removals: queue.SimpleQueue[_Removal] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._failed: BaseException | None = None
        self._closing = threading.Event()
        self._urgent = threading.Event()  # a record is queued that a caller awaits
        self._closed = False
        self.blocked = ""  # the reason that blocks writes; empty while writes succeed
        self.num_commits = 0
        self._committed_at = 0.0
        self.num_records = 0
        self._num_submitted = 0
        self._waiting_since = 0.0  # the last write, or the arrival of the first record after that write

    def start(self) -> None:
        """Start to write; the running event loop gets the callbacks."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def submit(
        self,
        kind: str,
        key: str,
        encode: Encode,
        on_durable: Callable[[], None] | None = None,
        *,
        urgent: bool = False,
    ) -> None:
        """Queue a record. The writer thread calls ``encode``, which must not read mutable state. ``urgent``: do not
        wait for other records of the same commit."""
        if self._failed is not None:
            raise InfrastructureError(f"the journal has failed: {self._failed}")
        if self._num_submitted == self.num_records:
            self._waiting_since = time.monotonic()
        self._num_submitted += 1
        self._queue.put(_Entry(kind, key, encode, on_durable))
        if urgent:
            self._urgent.set()

    def append(
        self, kind: str, key: str, encode: Encode, apply: Callable[[], None] | None = None
    ) -> asyncio.Future[None]:
        """Queue a record; the future completes when the record is durable. ``apply`` runs just before, in submission
        order."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def durable() -> None:
            if apply is not None:
                apply()
            if not future.done():
                future.set_result(None)

        self.submit(kind, key, encode, durable, urgent=True)
        return future

    def remove_segments(self, kind: str, segments: Iterable[int]) -> None:
        """Delete closed segments, each after the record of its deletion is durable. Blocking: call from a thread.

        Raises ``InfrastructureError`` when the journal is closed, has failed or does not answer, or the disk has no
        space for the record.
        """
        for segment in segments:
            removal = _Removal(kind, segment, Future())
            if self._failed is not None or self._closed:
                raise InfrastructureError(f"the journal is closed: {kind}-{segment:06d} is not deleted")
            self._removals.put(removal)
            self._queue.put(None)
            try:
                removal.done.result(REMOVE_DEADLINE_S)
            except TimeoutError:
                raise InfrastructureError(
                    f"{kind}-{segment:06d} was not deleted within {REMOVE_DEADLINE_S:g} s: {self.blocked or 'no answer'}"
                ) from None

    def withdraw(self) -> None:
        """Drop submitted records; only before ``start``."""
        assert self._thread is None
        self._queue = queue.SimpleQueue()
        self._num_submitted = self.num_records

    @property
    def waiting_s(self) -> float:
        """Seconds for which records wait without progress; 0 without waiting records."""
        return time.monotonic() - self._waiting_since if self._num_submitted > self.num_records else 0.0

    def free_bytes(self) -> int:
        return self._files.free_bytes(self.directory)

    async def close(self) -> None:
        """Write the queue and stop. On a full disk, gives up after a deadline: no queued record was acknowledged. A
        second close has no effect."""
        if self._closed:
            return
        self._closed = True
        if self._thread is not None:
            self._closing.set()
            self._queue.put(None)
            self._urgent.set()
            await asyncio.to_thread(self._thread.join, CLOSE_DEADLINE_S)
            if self._thread.is_alive():
                log.warning("journal.close_deadline", waited_s=CLOSE_DEADLINE_S, blocked=self.blocked)
                return
        self._segments.close()
        self._index.close()

    # --- the writer thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not (self._closing.is_set() and self._queue.empty()):
                if entries := self._collect():
                    self._write(entries)
                    awaited = [entry.on_durable for entry in entries if entry.on_durable is not None]
                    if awaited:  # avoids needless wake-ups of the loop
                        self._notify(self._announce, awaited)
                self._carry_out_removals()
        except BaseException as error:  # noqa: BLE001 - told to the process, which stops: the disk does not work
            self._failed = error
            log.error("journal.failed", error=repr(error))
            if self._on_failure is not None:
                self._notify(self._on_failure, error)

    def _collect(self) -> list[_Entry]:
        """The next records, at most ``MAX_RECORDS``; none where a removal waits, or the end. Waits for them; after a pause
        in the queue, the index gets its waiting rows."""
        while True:
            try:
                first = self._queue.get(timeout=self._index.due_in_s)
                break
            except queue.Empty:
                self._index.flush()
        # A lone record is committed at once; in a stream of them, commits are at least LINGER_S apart.
        linger_s = self._committed_at + LINGER_S - time.monotonic()
        if first and linger_s > 0 and self._queue.qsize() < MAX_RECORDS - 1 and not self._closing.is_set():
            self._urgent.wait(linger_s)
        self._urgent.clear()  # before the queue is read: a later record ends the next lingering
        entries: list[_Entry] = []
        found = first
        while found is not None:
            entries.append(found)
            if len(entries) == MAX_RECORDS or self._queue.empty():  # no other thread reads the queue
                break
            found = self._queue.get_nowait()
        return entries

    def _write(self, entries: list[_Entry]) -> None:
        payloads = [self._packer.pack(_line(entry)) for entry in entries]
        needed = sum(map(len, payloads))
        while True:
            free = self.free_bytes()
            if free < RESERVE_BYTES + needed:
                self._block(f"{free} bytes free in {self.directory}")
            else:
                try:
                    rows = self._commit(entries, payloads)
                    break
                except OSError as error:
                    if not machine.says_full(error):
                        raise
                    self._block(str(error))
            self._carry_out_removals()
            if self._closing.wait(RETRY_S):
                time.sleep(RETRY_S)  # closing: keep trying until the closer's deadline ends the process
        if self.blocked:
            log.info("journal.resumed", directory=str(self.directory))
            self.blocked = ""
        self._index.add(rows, self._segments.ends())

    def _commit(self, entries: list[_Entry], payloads: list[bytes]) -> list[Row]:
        named = [(entry.kind, entry.key, payload) for entry, payload in zip(entries, payloads, strict=True)]
        rows = self._segments.append(named)
        self._waiting_since = self._committed_at = time.monotonic()
        self.num_records += len(rows)
        self.num_commits += 1
        return rows

    def _carry_out_removals(self) -> None:
        while True:
            try:
                removal = self._removals.get_nowait()
            except queue.Empty:
                return
            try:
                self._remove(removal.kind, removal.segment)
            except OSError as error:
                if not machine.says_full(error):
                    raise
                told = f"{removal.kind}-{removal.segment:06d} is not deleted, as the disk has no space for the record of the deletion: {error}"
                removal.done.set_exception(InfrastructureError(told))
            else:
                removal.done.set_result(None)

    def _remove(self, kind: str, segment: int) -> None:
        """Delete a segment; the record before names the deleted numbers. Raises ``OSError`` where that record cannot be
        written."""
        runs = numbers_in(self.directory, kind, segment)
        record = {"kind": kind, "segment": segment, "numbers": runs}
        entry = _Entry(COLLECTED, f"{kind}/{segment}", lambda: record, None)
        rows = self._commit([entry], [self._packer.pack(_line(entry))])
        self._index.add(rows, self._segments.ends())
        self._index.flush()  # a reader that misses the segment finds its deletion in the index
        self.num_records -= 1  # written by the journal itself
        self._segments.remove(kind, segment)
        self._index.forget((kind, segment), runs)

    def _block(self, reason: str) -> None:
        if not self.blocked:
            log.error("journal.no_free_disk", reason=reason, effect="acknowledgements wait until there is space")
        self.blocked = reason

    def _announce(self, awaited: list[Callable[[], None]]) -> None:
        for on_durable in awaited:
            on_durable()

    def _notify(self, callback: Callable[..., None], *args: Any) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:  # the loop is closed: the process exits, and no caller waits
            log.debug("journal.loop_closed")

    def current_segments(self) -> dict[str, int]:
        """The open segment of each kind; earlier ones never change again."""
        return self._segments.current()


def _line(entry: _Entry) -> bytes:
    return orjson.dumps(entry.encode(), option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)
