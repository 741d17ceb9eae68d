"""An index of the rollouts of one run, for the lists of the page: task, training step, reward, length, fate, and words.

A temporary SQLite file: the run's directory is only read. One writer and any number of readers; each thread has a connection
to itself. Knows nothing of the journal.
"""

from __future__ import annotations

import re
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from services.common.errors import InvalidRequestError

TEXT_CHARACTERS = 20_000
"""Characters of a task's row, and of what a policy wrote in a rollout, that a search finds."""

PAGE_ROWS = 100
MOST_FOUND = 10_000
"""Rollouts at which a search for words stops: the newest of those that match, or the oldest where they come first."""

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

_WORD = re.compile(r"[^\W_]+")  # as FTS5 cuts words
_MOST_WORDS, _MOST_CHARACTERS = 12, 500  # of a search

TRAINED, WAITING, EVALUATION, FAILED = "in_a_batch", "waiting", "evaluation", "failed"
"""Fates beside those of ``GroupFate``, and the reasons of closed task groups."""

_SCHEMA = """
CREATE TABLE rollouts (
    number INTEGER PRIMARY KEY, task_group TEXT NOT NULL, slot INTEGER NOT NULL, task INTEGER NOT NULL,
    evaluation TEXT NOT NULL, reward REAL, tokens INTEGER NOT NULL, turns INTEGER NOT NULL, version INTEGER NOT NULL,
    stop TEXT NOT NULL, written_at REAL NOT NULL, fate TEXT NOT NULL, step INTEGER, UNIQUE (task_group, slot)
);
CREATE INDEX by_step ON rollouts (step);
CREATE INDEX by_reward ON rollouts (reward);
CREATE INDEX by_tokens ON rollouts (tokens);
CREATE INDEX by_task ON rollouts (task);
CREATE INDEX by_fate ON rollouts (fate, tokens);
CREATE TABLE tasks (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE VIRTUAL TABLE asked USING fts5 (text, content='', detail=none);
CREATE VIRTUAL TABLE written USING fts5 (text, content='', detail=none);
"""
_ROWS = "SELECT r.*, t.name AS task_id FROM rollouts AS r LEFT JOIN tasks AS t ON t.id = r.task WHERE "

Number = TypeVar("Number", int, float)


class Rollout(NamedTuple):
    """One durable record of a slot: a trajectory, or a failure (``reward`` None)."""

    number: int
    task_group: str
    slot: int
    task: int  # as ``add_task`` returns it
    evaluation: str  # empty: of training
    reward: float | None
    tokens: int
    turns: int
    version: int
    stop: str
    written_at: float
    fate: str = WAITING
    step: int | None = None  # the training step that used it first


class RolloutIndex:
    """``add_...`` and ``update`` inside ``writing()``; the questions from any thread."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="rollmill-page-")
        self._path = Path(self._directory.name) / "rollouts.sqlite"
        self._opened: list[sqlite3.Connection] = []
        self._writer = self._connect()
        self._writer.execute("PRAGMA journal_mode=WAL")
        self._writer.executescript(_SCHEMA)
        self._readers = threading.local()
        self._tasks: dict[str, int] = {}
        self._written = 0  # rows that committed transactions have changed
        self._facets: tuple[int, dict[str, Any]] = (-1, {})  # the rows changed then, and the answer
        self.num_rollouts = 0

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
        db.execute("PRAGMA synchronous=OFF")  # it is made anew by every process
        db.execute("PRAGMA temp_store=MEMORY")
        db.row_factory = sqlite3.Row
        self._opened.append(db)
        return db

    def close(self) -> None:
        for db in self._opened:
            db.close()
        self._directory.cleanup()

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

    def add_task(self, name: str, text: str) -> int:
        """The number of a task. ``text``: its row, for searches."""
        number = self._tasks.get(name)
        if number is None:
            number = self._tasks[name] = len(self._tasks) + 1
            self._writer.execute("INSERT INTO tasks VALUES (?, ?)", (number, name))
            self._writer.execute(
                "INSERT INTO asked (rowid, text) VALUES (?, ?)", (number, f"{name} {text[:TEXT_CHARACTERS]}")
            )
        return number

    def add_rollout(self, rollout: Rollout) -> None:
        self._writer.execute(f"INSERT INTO rollouts VALUES ({', '.join('?' * len(rollout))})", rollout)
        self.num_rollouts += 1

    def add_text(self, number: int, text: str) -> None:
        """Add the text of a rollout for searches; call once for each."""
        self._writer.execute("INSERT INTO written (rowid, text) VALUES (?, ?)", (number, text[:TEXT_CHARACTERS]))

    def update(self, task_group: str, outcomes: Iterable[tuple[int, str, int | None]]) -> None:
        """Set the fate and the training step of rollouts. ``outcomes``: slot, fate, step."""
        self._writer.executemany(
            "UPDATE rollouts SET fate = ?, step = ? WHERE task_group = ? AND slot = ?",
            [(fate, step, task_group, slot) for slot, fate, step in outcomes],
        )

    # --- asking ------------------------------------------------------------------------------------------------------

    def list_(self, query: Mapping[str, str]) -> dict[str, Any]:
        """``total`` rollouts that match a query of the page, and ``rows``: those of one page. ``more``: there are more than
        ``total``, at which a search for words stops.

        Raises ``InvalidRequestError`` for a value that is none of its key.
        """
        order = query.get("order", "newest")
        if order not in ORDERS:
            raise InvalidRequestError(f"order is {order[:50]!r}: write one of {', '.join(ORDERS)}")
        offset = max(0, number_of(query.get("offset") or "0", "offset", int))
        where, values = _condition(query)
        db = self._reader()
        words = _match(query.get("words", ""))
        if words:
            _search(db, words, where, values, "ASC" if order == "oldest" else "DESC")
            where, values = "r.number IN temp.found", []
        total = db.execute(f"SELECT COUNT(*) FROM rollouts AS r WHERE {where}", values).fetchone()[0]
        rows = db.execute(f"{_ROWS} {where} ORDER BY {ORDERS[order]} LIMIT ? OFFSET ?", (*values, PAGE_ROWS, offset))
        more = bool(words) and total > MOST_FOUND
        return {"total": MOST_FOUND if more else total, "more": more, "rows": [_row(row) for row in rows]}

    def one(self, number: int) -> dict[str, Any] | None:
        """The row of one rollout; None for a number that is not in the index."""
        row = self._reader().execute(f"{_ROWS} r.number = ?", (number,)).fetchone()
        return None if row is None else _row(row)

    def siblings(self, task_group: str) -> list[dict[str, Any]]:
        """The rollouts of a task group, by slot."""
        query = "SELECT number, slot, reward FROM rollouts WHERE task_group = ? ORDER BY slot"
        return [dict(row) for row in self._reader().execute(query, (task_group,))]

    def facets(self) -> dict[str, Any]:
        """The values that filters can have: fates and evaluations with their counts, and ranges of numbers. Counted once
        until the index changes."""
        if self._facets[0] != self._written:
            written, db = self._written, self._reader()
            found: dict[str, Any] = {
                f"{name}s": dict(
                    db.execute(
                        f"SELECT {name}, COUNT(*) AS found FROM rollouts GROUP BY {name} ORDER BY found DESC"
                    ).fetchall()
                )
                for name in ("fate", "evaluation")
            }
            for name in ("reward", "tokens", "step"):
                # One subquery for each end: SQLite reads it from the index, and both in one query from every row.
                ends = (f"(SELECT {end}({name}) FROM rollouts)" for end in ("MIN", "MAX"))
                found[name] = list(db.execute(f"SELECT {', '.join(ends)}").fetchone())
            self._facets = written, found
        return self._facets[1]

    def _reader(self) -> sqlite3.Connection:
        db: sqlite3.Connection | None = getattr(self._readers, "db", None)
        if db is None:
            db = self._readers.db = self._connect()
        return db


def number_of(text: str, name: str, kind: Callable[[str], Number]) -> Number:
    """Raises ``InvalidRequestError`` for a text that is no number, or one that SQLite cannot hold."""
    try:
        found = kind(text)
    except ValueError:
        raise InvalidRequestError(f"{name} is {text[:50]!r}: write a number") from None
    if not -(2**63) < found < 2**63:
        raise InvalidRequestError(f"{name} is {text[:50]!r}: write a smaller number")
    return found


# A + keeps SQLite from the index of a wide range: the newest rows come first, and are soon enough.
_NUMBERS: Mapping[str, tuple[str, Callable[[str], int | float]]] = {
    "step": ("r.step = ?", int),
    "min_reward": ("+r.reward >= ?", float),
    "max_reward": ("+r.reward <= ?", float),
    "min_tokens": ("+r.tokens >= ?", int),
    "max_tokens": ("+r.tokens <= ?", int),
}


def _condition(query: Mapping[str, str]) -> tuple[str, list[Any]]:
    """The condition on ``rollouts AS r`` in SQL, and its values: all that the query names must hold.

    ``task`` is an id or a pattern with ``*``; ``evaluation`` one such as ``end`` or ``end/greedy``, or ``-`` for training.
    """
    parts: list[str] = []
    values: list[Any] = []
    for name, (sql, kind) in _NUMBERS.items():
        if text := query.get(name, "").strip():
            parts.append(sql)
            values.append(number_of(text, name, kind))
    for name in ("task_group", "fate"):
        if text := query.get(name, "").strip():
            parts.append(f"r.{name} = ?")
            values.append(text)
    evaluation = query.get("evaluation", "")
    if evaluation == "-":
        parts.append("r.evaluation = ''")
    elif evaluation:
        parts.append("(r.evaluation = ? OR substr(r.evaluation, 1, ?) = ?)")
        values += [evaluation, len(evaluation) + 1, f"{evaluation}/"]
    if task := query.get("task", "").strip():
        parts.append("r.task IN (SELECT id FROM tasks WHERE name GLOB ?)")  # which reads *, ? and [: only * is meant
        values.append("".join(f"[{sign}]" if sign in "?[" else sign for sign in task))
    return " AND ".join(parts) or "1", values


def _match(text: str) -> str:
    """A query of FTS5 for texts with all words, each the beginning of a term and quoted, so that FTS5 reads no syntax in it.

    >>> _match('two AND "seven-8')
    '"two"* AND "AND"* AND "seven"* AND "8"*'
    """
    words = _WORD.findall(text[:_MOST_CHARACTERS])[:_MOST_WORDS]
    return " AND ".join(f'"{word}"*' for word in words) or ('""' if text.strip() else "")


def _search(db: sqlite3.Connection, words: str, where: str, values: list[Any], by_age: str) -> None:
    """Put the numbers of the rollouts that match into ``temp.found``, at most ``MOST_FOUND`` + 1 by their own text and as
    many by their task's, in SQLite alone: to fetch a row in Python costs more than to find it, and a common word is in most
    rollouts."""
    db.execute("CREATE TEMP TABLE IF NOT EXISTS found (number INTEGER PRIMARY KEY)")
    db.execute("DELETE FROM temp.found")
    for number, matches in (
        ("written.rowid", "written CROSS JOIN rollouts AS r ON r.number = written.rowid WHERE written MATCH ?"),
        # A + keeps SQLite from the index of tasks: the rollouts of many tasks are found by age, and soon enough.
        ("r.number", "rollouts AS r WHERE +r.task IN (SELECT rowid FROM asked WHERE asked MATCH ?)"),
    ):
        bound = f"ORDER BY {number} {by_age} LIMIT {MOST_FOUND + 1}"
        found = f"SELECT r.number FROM {matches} AND {where} {bound}"
        db.execute(f"INSERT OR IGNORE INTO temp.found {found}", (words, *values))


def _row(row: sqlite3.Row) -> dict[str, Any]:
    found = dict(row)
    del found["task"]
    return found
