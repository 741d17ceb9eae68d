"""Filters and orders of a list of rollouts, and their SQL."""

from __future__ import annotations

import re
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from services.cli.inspect.trajectories import Pieces
from services.common.records.fates import GroupFate
from services.common.records.types import Purpose, TokenSource
from services.orchestrator.journal import records, rollouts
from services.orchestrator.journal.reader import JournalReader
from services.orchestrator.journal.storage.segments import Row
from services.orchestrator.state.groups import split_sequence_id

_WORD = re.compile(r"[^\W_]+")  # as FTS5 cuts words
_MOST_WORDS = 12

ORDERS = {
    "newest": "r.number DESC",
    "oldest": "r.number",
    "reward": "r.reward DESC, r.number DESC",
    "-reward": "r.reward NULLS LAST, r.number",
    "tokens": "r.tokens DESC, r.number DESC",
    "-tokens": "r.tokens, r.number",
}
"""The orders of a list, each one that SQLite reads from an index without a sort. A rollout that failed has no reward and
comes last."""

BY_AGE = {"newest": "DESC", "oldest": "ASC"}
"""Orders by number, with the direction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which rollouts to list; all that is given must hold."""

    words: str = ""
    task: str = ""
    """A task id, or a pattern with ``*``."""
    task_group: str = ""
    step: int | None = None
    evaluation: str = ""
    """Played for this evaluation, such as ``end`` or ``end/greedy``; ``-`` for training."""
    fate: str = ""
    min_reward: float | None = None
    max_reward: float | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    order: str = "newest"
    offset: int = 0


def condition(wanted: Filter) -> tuple[str, list[Any]]:
    """The condition on ``rollouts AS r`` in SQL, and its values. Words are not part of it."""
    parts: list[str] = []
    values: list[Any] = []
    # A + keeps SQLite from the index of a wide range: the newest rows come first, and are soon enough.
    simple: Mapping[str, Any] = {
        "r.task_group = ?": wanted.task_group or None,
        "r.step = ?": wanted.step,
        "r.fate = ?": wanted.fate or None,
        "+r.reward >= ?": wanted.min_reward,
        "+r.reward <= ?": wanted.max_reward,
        "+r.tokens >= ?": wanted.min_tokens,
        "+r.tokens <= ?": wanted.max_tokens,
    }
    for text, value in simple.items():
        if value is not None:
            parts.append(text)
            values.append(value)
    if wanted.evaluation == "-":
        parts.append("r.evaluation = ''")
    elif wanted.evaluation:
        parts.append("(r.evaluation = ? OR substr(r.evaluation, 1, ?) = ?)")
        values += [wanted.evaluation, len(wanted.evaluation) + 1, f"{wanted.evaluation}/"]
    if wanted.task:
        parts.append("r.task IN (SELECT id FROM tasks WHERE name GLOB ?)")
        values.append(_glob(wanted.task))
    return " AND ".join(parts) or "1", values


def _glob(pattern: str) -> str:
    """SQLite's GLOB reads ``*``, ``?`` and ``[``; only ``*`` is meant."""
    return "".join(f"[{sign}]" if sign in "?[" else sign for sign in pattern)


def words_of(text: str) -> list[str]:
    """The words of a search; the first ``_MOST_WORDS`` count.

    >>> words_of('two AND "seven-8')
    ['two', 'AND', 'seven', '8']
    """
    return _WORD.findall(text)[:_MOST_WORDS]


TEXT_CHARACTERS = 20_000
"""Characters of a task's row, and of what a policy wrote in a rollout, that a search finds."""

PAGE_ROWS = 100
MOST_FOUND = 10_000
"""Rollouts at which a search for words stops, where the list is ordered by age."""

_MOST_BY_INDEX = 50  # tasks whose rollouts are looked up one task after another
_MOST_TERMS = 8  # that begin with a word and are searched by name
_BEHIND = "\U0010ffff"  # behind every character

TRAINED = "in_a_batch"
WAITING = "waiting"
EVALUATION = "evaluation"
FAILED = "failed"
"""Fates beside those of ``GroupFate``."""


_SCHEMA = """
CREATE TABLE rollouts (
    number INTEGER PRIMARY KEY,
    task_group TEXT NOT NULL,
    slot INTEGER NOT NULL,
    task INTEGER NOT NULL,
    evaluation TEXT NOT NULL,
    reward REAL,
    tokens INTEGER NOT NULL,
    turns INTEGER NOT NULL,
    version INTEGER NOT NULL,
    stop TEXT NOT NULL,
    fate TEXT NOT NULL,
    step INTEGER,
    written_at REAL NOT NULL,
    UNIQUE (task_group, slot)
);
CREATE INDEX by_step ON rollouts (step);
CREATE INDEX by_reward ON rollouts (reward);
CREATE INDEX by_tokens ON rollouts (tokens);
CREATE INDEX by_task ON rollouts (task);
CREATE INDEX by_fate ON rollouts (fate, tokens);
CREATE TABLE tasks (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE task_groups (name TEXT PRIMARY KEY, task INTEGER NOT NULL, evaluation TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE uses (
    task_group TEXT NOT NULL, slot INTEGER NOT NULL, policy TEXT NOT NULL, step INTEGER NOT NULL,
    PRIMARY KEY (task_group, slot, policy, step)
) WITHOUT ROWID;
CREATE VIRTUAL TABLE asked USING fts5 (text, content='', detail=none);
CREATE VIRTUAL TABLE written USING fts5 (text, content='', detail=none);
CREATE VIRTUAL TABLE asked_terms USING fts5vocab (asked, row);
CREATE VIRTUAL TABLE written_terms USING fts5vocab (written, row);
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One durable record of a slot: a trajectory, or a failure (``reward`` None)."""

    number: int
    task_group: str
    slot: int
    reward: float | None
    tokens: int
    turns: int
    version: int
    stop: str
    fate: str
    written_at: float


class RolloutIndex:
    """``add_...`` and ``mark...`` inside ``writing()``; ``list_`` and ``facets`` from any thread."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="rollmill-page-")
        self._path = Path(self._directory.name) / "rollouts.sqlite"
        self._writer = self._connect()
        self._writer.execute("PRAGMA journal_mode=WAL")
        self._writer.executescript(_SCHEMA)
        self._readers = threading.local()
        self._opened: list[sqlite3.Connection] = []
        self._written = 0  # rows that committed transactions have changed
        self._facets: tuple[int, dict[str, Any]] = (-1, {})  # the rows changed then, and the answer
        self.num_rollouts = 0

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
        db.execute("PRAGMA synchronous=OFF")  # it is made anew by every process
        db.execute("PRAGMA temp_store=MEMORY")
        db.row_factory = sqlite3.Row
        return db

    # --- writing -----------------------------------------------------------------------------------------------------

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A transaction."""
        self._writer.execute("BEGIN")
        try:
            yield
        finally:
            self._writer.execute("COMMIT")
            self._written = self._writer.total_changes

    def add_group(self, name: str, task: str, evaluation: str, text: str) -> None:
        """An issued task group. ``text``: the row of its task, for searches."""
        known = self._writer.execute("SELECT id FROM tasks WHERE name = ?", (task,)).fetchone()
        if known is None:
            number = self._writer.execute("INSERT INTO tasks (name) VALUES (?)", (task,)).lastrowid
            self._writer.execute(
                "INSERT INTO asked (rowid, text) VALUES (?, ?)", (number, f"{task} {text[:TEXT_CHARACTERS]}")
            )
        else:
            number = known["id"]
        self._writer.execute("INSERT OR IGNORE INTO task_groups VALUES (?, ?, ?)", (name, number, evaluation))

    def add_rollout(self, rollout: Rollout) -> bool:
        """The first record of a slot counts: False for a later one, whose text must not be added. A rollout whose task
        group is not known has the task 0."""
        group = self._writer.execute(
            "SELECT task, evaluation FROM task_groups WHERE name = ?", (rollout.task_group,)
        ).fetchone()
        task, evaluation = (0, "") if group is None else (group["task"], group["evaluation"])
        fate = EVALUATION if evaluation and rollout.fate == WAITING else rollout.fate
        added = self._writer.execute(
            "INSERT OR IGNORE INTO rollouts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, NULL, ?)",
            (
                rollout.number, rollout.task_group, rollout.slot, task, evaluation, rollout.reward, rollout.tokens,
                rollout.turns, rollout.version, rollout.stop, fate, rollout.written_at,
            ),
        ).rowcount  # fmt: skip
        self.num_rollouts += added
        return bool(added)

    def add_text(self, number: int, text: str) -> None:
        """Add the text of a rollout for searches; call once for each."""
        if text:
            self._writer.execute("INSERT INTO written (rowid, text) VALUES (?, ?)", (number, text[:TEXT_CHARACTERS]))

    def mark(self, task_group: str, slot: int, fate: str) -> None:
        """The fate of a rollout at the completion of its task group."""
        self._writer.execute(
            "UPDATE rollouts SET fate = ? WHERE task_group = ? AND slot = ? AND step IS NULL", (fate, task_group, slot)
        )

    def mark_closed(self, task_group: str, reason: str) -> None:
        """The fate of the rollouts of a closed task group that no batch has taken."""
        self._writer.execute(
            "UPDATE rollouts SET fate = ? WHERE task_group = ? AND fate = ?", (reason, task_group, WAITING)
        )

    def mark_trained(self, task_group: str, slot: int, policy: str, step: int) -> None:
        """The batch of a training step holds the rollout; of several steps the first is its own."""
        self._writer.execute(
            "UPDATE rollouts SET fate = ?, step = COALESCE(step, ?) WHERE task_group = ? AND slot = ?",
            (TRAINED, step, task_group, slot),
        )
        self._writer.execute("INSERT OR IGNORE INTO uses VALUES (?, ?, ?, ?)", (task_group, slot, policy, step))

    # --- asking ------------------------------------------------------------------------------------------------------

    def list_(self, wanted: Filter) -> dict[str, Any]:
        """``total`` rollouts that match, and ``rows``: those of one page. ``more``: there are more than ``total``, at which
        a search for words stops."""
        db = self._reader()
        where, values = condition(wanted)
        if is_search := bool(wanted.words.strip()):
            _search(db, wanted)
            total = db.execute("SELECT COUNT(*) FROM temp.found").fetchone()[0]
            # A + keeps SQLite from a sort of many rows: those of the page are soon found in the index of the order.
            where, values = f"{'+' if total > MOST_FOUND else ''}r.number IN temp.found", []
        else:
            total = db.execute(f"SELECT COUNT(*) FROM rollouts AS r WHERE {where}", values).fetchone()[0]
        rows = db.execute(
            "SELECT r.*, t.name AS task_id FROM rollouts AS r LEFT JOIN tasks AS t ON t.id = r.task "
            f"WHERE {where} ORDER BY {ORDERS[wanted.order]} LIMIT ? OFFSET ?",
            (*values, PAGE_ROWS, wanted.offset),
        )
        more = is_search and wanted.order in BY_AGE and total > MOST_FOUND
        return {"total": MOST_FOUND if more else total, "more": more, "rows": [_row(row) for row in rows]}

    def one(self, number: int) -> dict[str, Any] | None:
        """The row of one rollout; None for a number that is not in the index."""
        query = (
            "SELECT r.*, t.name AS task_id FROM rollouts AS r LEFT JOIN tasks AS t ON t.id = r.task WHERE r.number = ?"
        )
        row = self._reader().execute(query, (number,)).fetchone()
        return None if row is None else _row(row)

    def uses(self, task_group: str, slot: int) -> list[tuple[str, int]]:
        """Policy and training step of the batches that hold a rollout."""
        query = "SELECT policy, step FROM uses WHERE task_group = ? AND slot = ? ORDER BY step, policy"
        return [(row["policy"], row["step"]) for row in self._reader().execute(query, (task_group, slot))]

    def siblings(self, task_group: str) -> list[dict[str, Any]]:
        """The rollouts of a task group, by slot."""
        query = "SELECT number, slot, reward FROM rollouts WHERE task_group = ? ORDER BY slot"
        return [dict(row) for row in self._reader().execute(query, (task_group,))]

    def facets(self) -> dict[str, Any]:
        """The values that filters can have: fates and evaluations with their counts, and ranges of numbers. Counted once
        until the index changes."""
        written, found = self._facets
        if written != self._written:
            self._facets = _, found = self._written, self._count_facets(self._reader())
        return found

    @staticmethod
    def _count_facets(db: sqlite3.Connection) -> dict[str, Any]:
        fates = db.execute("SELECT fate, COUNT(*) AS found FROM rollouts GROUP BY fate ORDER BY found DESC")
        evaluations = db.execute("SELECT evaluation, COUNT(*) AS found FROM rollouts GROUP BY evaluation")
        # One subquery for each end: SQLite reads it from the index, and several in one query from every row.
        ends = ", ".join(
            f"(SELECT {end}({column}) FROM rollouts)"
            for column in ("reward", "tokens", "step")
            for end in ("MIN", "MAX")
        )
        ranges = list(db.execute(f"SELECT {ends}").fetchone())
        return {
            "fates": {row["fate"]: row["found"] for row in fates},
            "evaluations": {row["evaluation"]: row["found"] for row in evaluations},
            "reward": ranges[:2],
            "tokens": ranges[2:4],
            "step": ranges[4:],
        }

    def _reader(self) -> sqlite3.Connection:
        db: sqlite3.Connection | None = getattr(self._readers, "db", None)
        if db is None:
            db = self._readers.db = self._connect()
            self._opened.append(db)
        return db

    def close(self) -> None:
        for db in (self._writer, *self._opened):
            db.close()
        self._directory.cleanup()


def _search(db: sqlite3.Connection, wanted: Filter) -> None:
    """Put the numbers of the rollouts that match into ``temp.found``, in SQLite alone: to fetch a row in Python costs more
    than to find it, and a common word is in most rollouts.

    In an order by age each table adds at most the first ``MOST_FOUND`` + 1.
    """
    db.execute("CREATE TEMP TABLE IF NOT EXISTS found (number INTEGER PRIMARY KEY)")
    db.execute("DELETE FROM temp.found")
    words = words_of(wanted.words)
    where, values = condition(wanted)
    first = f"ORDER BY {{}} {BY_AGE[wanted.order]} LIMIT {MOST_FOUND + 1}" if wanted.order in BY_AGE else ""
    if query := _query(db, "written", words):
        db.execute(
            "INSERT INTO temp.found SELECT r.number FROM written CROSS JOIN rollouts AS r ON r.number = written.rowid "
            f"WHERE written MATCH ? AND {where} {first.format('written.rowid')}",
            (query, *values),
        )
    if query := _query(db, "asked", words):
        num_tasks = db.execute("SELECT COUNT(*) FROM asked WHERE asked MATCH ?", (query,)).fetchone()[0]
        # A + keeps SQLite from the index of tasks: the rollouts of many tasks are found by age, and soon enough.
        task = "+r.task" if num_tasks > _MOST_BY_INDEX else "r.task"
        db.execute(
            "INSERT OR IGNORE INTO temp.found SELECT r.number FROM rollouts AS r "
            f"WHERE {task} IN (SELECT rowid FROM asked WHERE asked MATCH ?) AND {where} {first.format('r.number')}",
            (query, *values),
        )


def _query(db: sqlite3.Connection, table: str, words: Sequence[str]) -> str:
    """A query of FTS5 for the texts that have all words, each as the beginning of a term; empty when no text can.

    Each word is quoted, so that FTS5 reads no syntax in the word. Where few terms begin with a word they are named: FTS5
    reads the whole list of a prefix before its first row, and the lists of terms as far as rows are wanted. Other letters
    than ASCII are left to FTS5, which knows how it has folded them.
    """
    parts = []
    for word in words:
        terms = [f'"{word}"*']
        if word.isascii():
            begin = word.lower()
            found = db.execute(
                f"SELECT term FROM {table}_terms WHERE term >= ? AND term <= ? LIMIT {_MOST_TERMS + 1}",
                (begin, begin + _BEHIND),
            ).fetchall()
            if not found:
                return ""
            if len(found) <= _MOST_TERMS:
                terms = [f'"{term}"' for (term,) in found]
        parts.append(f"({' OR '.join(terms)})")
    return " AND ".join(parts)


def _row(row: sqlite3.Row) -> dict[str, Any]:
    found = dict(row)
    del found["task"]
    return found


def joined(parts: Iterable[str], most: int = TEXT_CHARACTERS) -> str:
    """The beginning of a text; the rest is not built."""
    found: list[str] = []
    length = 0
    for part in parts:
        found.append(part)
        length += len(part)
        if length >= most:
            break
    return "".join(found)[:most]


CHUNK = 200
"""Records of one transaction: what a question to the same journal may wait for."""

Json = dict[str, Any]


class Filler:
    """``fill`` until it returns False; later calls take new records."""

    def __init__(
        self, reader: JournalReader, index: RolloutIndex, pieces: Callable[[], Mapping[str, Pieces] | None]
    ) -> None:
        """``pieces``: the texts of tokens by policy; None while tokenizers are being loaded, and then the texts of what is
        indexed meanwhile are added later."""
        self._reader = reader
        self._index = index
        self._pieces = pieces
        self._last = 0
        self._take: Mapping[str, Callable[[Row, Json], None]] = {
            records.GROUP: self._group,
            records.TRAJECTORY: self._trajectory,
            records.FAILURE: self._failure,
            records.VERDICT: self._verdict,
            records.BATCH: self._batch,
            records.CLOSED: self._closed,
        }
        self._without_text: list[int] = []  # numbers of trajectories
        self.is_complete = False
        self.num_unreadable = 0
        """Records that are damaged, or not of this project."""

    @property
    def num_without_text(self) -> int:
        """Rollouts whose text waits for the tokenizers."""
        return len(self._without_text)

    @property
    def done(self) -> int:
        """The number of the last record that was read."""
        return self._last

    def fill(self) -> bool:
        """Index the next ``CHUNK`` records; False when there were fewer."""
        last = self._last
        found = self._reader.select("r.number > ?", (last,), lambda row: row.number > last)
        rows = list(islice(found, CHUNK))
        with self._index.writing():
            for row in rows:
                take = self._take.get(row.kind)
                if take is not None:
                    self._add(row, take)
                self._last = row.number
        self.is_complete = len(rows) < CHUNK
        return not self.is_complete

    def add_texts(self) -> bool:
        """The same for texts of rollouts that were indexed while tokenizers were being loaded."""
        if self._pieces() is None:
            return False
        part = self._without_text[:CHUNK]
        with self._index.writing():
            for number in part:
                found = next(self._reader.select("r.number = ?", (number,), partial(_has_number, number)), None)
                if found is not None:
                    self._add(found, self._add_text)
        self._without_text = self._without_text[CHUNK:]  # after the commit: another thread reads how many wait
        return bool(self._without_text)

    def _add(self, row: Row, take: Callable[[Row, Json], None]) -> None:
        record = self._reader.load(row)
        if record is None:
            self.num_unreadable += 1
            return
        try:
            take(row, record)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError):  # JSON of another shape
            self.num_unreadable += 1

    def _group(self, row: Row, record: Json) -> None:
        evaluation = str(record["evaluation"])
        if record["purpose"] != Purpose.TRAIN.value and not evaluation:
            evaluation = str(record["purpose"])
        self._index.add_group(row.key, str(record["task_id"]), evaluation, str(record["data_json"]))

    def _trajectory(self, row: Row, record: Json) -> None:
        group, _, slot = row.key.rpartition("/")
        sequences = record["sequences"]
        written = _written(record)
        is_first = self._index.add_rollout(
            Rollout(
                number=row.number,
                task_group=group,
                slot=int(slot),
                reward=float(record["reward"]),
                tokens=sum(int(segment["num_tokens"]) for _, segment in written),
                turns=sum(_num_turns(sequence["segments"]) for sequence in sequences),
                version=max((int(segment["weight_version"]) for _, segment in written), default=0),
                stop=str(sequences[-1]["stop_reason"]) if sequences else "",
                fate=WAITING,
                written_at=row.written_at,
            )
        )
        if not is_first:
            return
        if self._pieces() is None:
            self._without_text.append(row.number)
        else:
            self._add_text(row, record)

    def _add_text(self, row: Row, record: Json) -> None:
        pieces = self._pieces() or {}
        texts = (
            "".join(pieces[policy].of(rollouts.unpack_tokens(segment["token_ids"], segment["num_tokens"]).tolist()))
            for policy, segment in _written(record)
            if policy in pieces
        )
        self._index.add_text(row.number, joined(texts))

    def _failure(self, row: Row, record: Json) -> None:
        group, _, slot = row.key.rpartition("/")
        is_first = self._index.add_rollout(
            Rollout(
                number=row.number, task_group=group, slot=int(slot), reward=None, tokens=0, turns=0, version=0,
                stop=str(record["reason"]), fate=FAILED, written_at=row.written_at,
            )
        )  # fmt: skip
        if is_first:
            self._index.add_text(row.number, f"{record['reason']} {record['detail']}")

    def _verdict(self, row: Row, record: Json) -> None:
        for verdict in records.verdicts_from_json(record):
            for member in verdict.members:
                fate = WAITING if member.fate is GroupFate.KEPT else member.fate.value
                self._index.mark(row.key, member.index, fate)

    def _closed(self, row: Row, record: Json) -> None:
        self._index.mark_closed(row.key, records.closed_reason(record))

    def _batch(self, row: Row, record: Json) -> None:
        policy, step = str(record["policy"]), int(record["training_step"])
        for entry in record["sequences"]:
            group, slot, _ = split_sequence_id(entry["sequence_id"])
            self._index.mark_trained(group, slot, policy, step)


def _written(record: Json) -> list[tuple[str, Json]]:
    """The segments that policies wrote, each with its policy."""
    sequences = record["sequences"]
    return [
        (s["policy"], segment)
        for s in sequences
        for segment in s["segments"]
        if segment["source"] == TokenSource.POLICY
    ]


def _num_turns(segments: list[Json]) -> int:
    """Of the policy; a turn has a segment for each weight version."""
    return sum(by_policy for by_policy, _ in groupby(segments, lambda segment: segment["source"] == TokenSource.POLICY))


def _has_number(number: int, row: Row) -> bool:
    return row.number == number
