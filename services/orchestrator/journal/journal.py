"""Writes the journal: every record that the orchestrator has acknowledged, on disk, in submission order.

    submit -> [queue] -> writer thread: write to segments -> sync (power) -> event loop: on_durable

Invariants: ``on_durable`` is called only when the records are in their segments (with ``durability: power``: synced,
names included), in submission order. The writer drops no submitted record. Group commit: at most ``MAX_RECORDS`` records
or ``LINGER_S`` (below 20 ms); a record that a caller awaits ends the lingering. On a full disk the thread keeps its
records, logs the state and retries: no record is acknowledged meanwhile. The writer thread encodes JSON.

``collect`` is the retention: it deletes segments without a needed record, also while the disk is full.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import structlog

from services.common.errors import ConfigError, CorruptDataError, InfrastructureError
from services.common.system import machine
from services.common.system.machine import RESERVE_BYTES
from services.orchestrator.groups import split_sequence_id
from services.orchestrator.journal import entries
from services.orchestrator.journal.reader import JournalReader
from services.orchestrator.journal.segments import (
    MAX_NUMBER,
    DamageReason,
    Durability,
    Files,
    Packer,
    Place,
    Row,
    SegmentSet,
    delete_segment,
    sizes_in,
)

log = structlog.get_logger()

MAX_RECORDS = 64
LINGER_S = 0.01
RETRY_S = 0.5  # between attempts while the disk is full
CLOSE_DEADLINE_S = 10.0
_LOGGED = 20  # damaged spans that are logged one by one


@dataclass(frozen=True, slots=True)
class _Entry:
    kind: str
    key: str
    record: Any
    on_durable: Callable[..., None] | None
    args: tuple[Any, ...]


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
        self.reader = JournalReader(directory)
        self.reading = threading.Lock()  # of ``reader``, for the threads that use it while the run goes on
        damage = self.reader.damage()
        for span in damage[:_LOGGED]:
            log.error("journal.damaged", span=str(span), directory=str(directory), effect="its bytes stay there")
        if damage:
            log.error("journal.damage", spans=len(damage), num_bytes=sum(span.num_bytes for span in damage))
        next_number = self.reader.last_number() + 1
        if next_number > MAX_NUMBER // 2:
            self.reader.close()
            raise ConfigError(
                f"a record of the journal in {directory} has the number {next_number - 1}, which no run reaches: "
                f"find it with `rollmill journal {directory.parent} list --last 1`, and take its segment away"
            )
        self._segments = SegmentSet(
            directory, next_number=next_number, segment_bytes=segment_bytes, durability=durability, files=self._files
        )
        self._queue: queue.SimpleQueue[_Entry | None] = queue.SimpleQueue()  # None: the end
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
        record: Any,
        on_durable: Callable[..., None] | None = None,
        *args: Any,
        urgent: bool = False,
    ) -> None:
        """Queue a record of ``entries``, or a JSON object; the writer thread encodes it, so it must not change.
        ``on_durable`` is called with ``args``. ``urgent``: do not wait for other records of the same commit."""
        if self._failed is not None:
            raise InfrastructureError(f"the journal has failed: {self._failed}")
        if self._num_submitted == self.num_records:
            self._waiting_since = time.monotonic()
        self._num_submitted += 1
        self._queue.put(_Entry(kind, key, record, on_durable, args))
        if urgent:
            self._urgent.set()

    def append(
        self, kind: str, key: str, record: Any, apply: Callable[..., None] | None = None, *args: Any
    ) -> asyncio.Future[None]:
        """Queue a record; the future completes when the record is durable. ``apply`` is called with ``args`` just before,
        in submission order."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.submit(kind, key, record, self._appended, future, apply, args, urgent=True)
        return future

    def _appended(self, future: asyncio.Future[None], apply: Callable[..., None] | None, args: tuple[Any, ...]) -> None:
        if apply is not None:
            apply(*args)
        if not future.done():
            future.set_result(None)

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
        with self.reading:
            self.reader.close()

    # --- the writer thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not (self._closing.is_set() and self._queue.empty()):
                if batch := self._collect():
                    self._write(batch)
                    awaited = [entry for entry in batch if entry.on_durable is not None]
                    if awaited:  # avoids needless wake-ups of the loop
                        self._notify(self._announce, awaited)
        except BaseException as error:  # noqa: BLE001 - told to the process, which stops: the disk does not work
            self._failed = error
            log.error("journal.failed", error=repr(error))
            if self._on_failure is not None:
                self._notify(self._on_failure, error)

    def _collect(self) -> list[_Entry]:
        """Wait for the next records, at most ``MAX_RECORDS``; none at the end."""
        first = self._queue.get()
        # A lone record is committed at once; in a stream of them, commits are at least LINGER_S apart.
        linger_s = self._committed_at + LINGER_S - time.monotonic()
        if first and linger_s > 0 and self._queue.qsize() < MAX_RECORDS - 1 and not self._closing.is_set():
            self._urgent.wait(linger_s)
        self._urgent.clear()  # before the queue is read: a later record ends the next lingering
        batch: list[_Entry] = []
        found = first
        while found is not None:
            batch.append(found)
            if len(batch) == MAX_RECORDS or self._queue.empty():  # no other thread reads the queue
                break
            found = self._queue.get_nowait()
        return batch

    def _write(self, batch: list[_Entry]) -> None:
        option = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
        lines = [orjson.dumps(entries.to_json(entry.record), option=option) for entry in batch]
        payloads = [self._packer.pack(line) for line in lines]
        needed = sum(map(len, payloads))
        while True:
            free = self._files.free_bytes(self.directory)
            if free < RESERVE_BYTES + needed:
                self._block(f"{free} bytes free in {self.directory}")
            else:
                try:
                    self._segments.append(
                        [(entry.kind, entry.key, payload) for entry, payload in zip(batch, payloads, strict=True)]
                    )
                    break
                except OSError as error:
                    if not machine.says_full(error):
                        raise
                    self._block(str(error))
            if self._closing.wait(RETRY_S):
                time.sleep(RETRY_S)  # closing: keep trying until the closer's deadline ends the process
        self._waiting_since = self._committed_at = time.monotonic()
        self.num_records += len(batch)
        self.num_commits += 1
        if self.blocked:
            log.info("journal.resumed", directory=str(self.directory))
            self.blocked = ""

    def _block(self, reason: str) -> None:
        if not self.blocked:
            log.error("journal.no_free_disk", reason=reason, effect="acknowledgements wait until there is space")
        self.blocked = reason

    def _announce(self, awaited: list[_Entry]) -> None:
        for entry in awaited:
            assert entry.on_durable is not None
            entry.on_durable(*entry.args)

    def _notify(self, callback: Callable[..., None], *args: Any) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:  # the loop is closed: the process exits, and no caller waits
            log.debug("journal.loop_closed")

    def current_segments(self) -> dict[str, int]:
        """The open segment of each kind; earlier ones never change again."""
        return self._segments.current()


# --- retention -------------------------------------------------------------------------------------------------------


def collect(
    journal: Journal,
    oldest_checkpoint_steps: Mapping[str, int],
    live_groups: Collection[str],
    *,
    current: Mapping[str, int] | None = None,
) -> list[Place]:
    """Delete the closed segments of which the run can need no record, and return them. Blocking: call from a thread.

    Needed are trajectories of batches since the oldest kept checkpoint of their policy and of live task groups, and the
    newest state. All other kinds stay for ever: they are small, and metrics, fates and traces are made from them
    (docs/journal.md). A segment with damage stays.

    ``oldest_checkpoint_steps``: by policy, the oldest checkpoint that its trainer may start from. ``live_groups`` are task
    groups that are running or have sequences in a buffer; ``current`` are the open segments at a moment before the listing
    of these groups (default: now), so that later records stay.

    Raises ``OSError``.
    """
    current = journal.current_segments() if current is None else current
    with journal.reading:
        reader = journal.reader
        stays = {(d.kind, d.segment) for d in reader.damage() if d.reason is not DamageReason.TORN}
        needed: dict[str, Iterable[Row]] = {entries.STATE: _newest(reader, entries.STATE)}
        trajectories = needed_trajectories(reader, oldest_checkpoint_steps, live_groups)
        if trajectories is not None:
            needed[entries.TRAJECTORY] = trajectories
        stays |= {(row.kind, row.segment) for rows in needed.values() for row in rows}
    removed = [
        place
        for place in sizes_in(journal.directory)
        if place[0] in needed and place[1] < current.get(place[0], 0) and place not in stays
    ]
    for kind, segment in removed:
        delete_segment(journal.directory, kind, segment)
    return removed


def needed_trajectories(
    reader: JournalReader, oldest_checkpoint_steps: Mapping[str, int], live_groups: Collection[str]
) -> list[Row] | None:
    """Rows of the needed trajectories: of batches after the oldest kept checkpoint, and of live task groups. None while one of these
    batches is unreadable: a failing disk may return the batch later."""
    keys: dict[str, None] = {}
    for row in reader.rows_of(entries.BATCH):
        policy, _, step = row.key.rpartition("/")
        if not step.isdecimal() or int(step) <= oldest_checkpoint_steps.get(policy, 0):
            continue
        try:
            batch = entries.from_json(entries.BatchRecord, reader.load(row) or {})
            slots = [split_sequence_id(entry.sequence_id)[:2] for entry in batch.entries]
        except (CorruptDataError, KeyError, TypeError, ValueError, AttributeError) as error:
            log.warning("journal.nothing_collected", batch=row.key, reason=f"{type(error).__name__}: {error}")
            return None
        keys |= dict.fromkeys(entries.trajectory_key(group, index) for group, index in slots)
    rows = {row.number: row for row in reader.find_rows(entries.TRAJECTORY, keys)}
    for name in live_groups:
        rows |= {row.number: row for row in reader.rows_below(entries.TRAJECTORY, f"{name}/")}
    return list(rows.values())


def _newest(reader: JournalReader, kind: str) -> Iterator[Row]:
    """Rows of a kind from the newest back to the first readable one."""
    for row in reader.last_rows(kind):
        yield row
        if reader.load(row) is not None:
            return
