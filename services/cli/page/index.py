"""An index of the rollouts of one run, for the questions that the journal's own index cannot answer: task, training step,
reward, length, fate, and words of a conversation.

A temporary SQLite file beside no run: the run's directory is only read. One writer and any number of readers; each call
has a connection to itself. Knows nothing of the journal.
"""

from __future__ import annotations

import sqlite3
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.cli.page.filters import BY_AGE, ORDERS, Filter, condition, words_of

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
