"""An index of the rollouts of one run, for the lists of the page: task, training step, reward, length, fate, and words.

A temporary SQLite file: the run's directory is only read. One writer and any number of readers. Knows nothing of the journal.
"""

from __future__ import annotations

import re
import sqlite3
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from services.common.errors import InvalidRequestError

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
PRAGMA journal_mode=WAL;
CREATE TABLE rollouts (
    number INTEGER PRIMARY KEY, task_group TEXT NOT NULL, slot INTEGER NOT NULL, task_id TEXT NOT NULL,
    evaluation TEXT NOT NULL, reward REAL, tokens INTEGER NOT NULL, turns INTEGER NOT NULL, version INTEGER NOT NULL,
    stop TEXT NOT NULL, written_at REAL NOT NULL, fate TEXT NOT NULL, step INTEGER, UNIQUE (task_group, slot)
);
CREATE INDEX by_step ON rollouts (step);
CREATE INDEX by_reward ON rollouts (reward);
CREATE INDEX by_tokens ON rollouts (tokens);
CREATE INDEX by_fate ON rollouts (fate, tokens);
CREATE INDEX by_evaluation ON rollouts (evaluation);
CREATE VIRTUAL TABLE texts USING fts5 (text, content='', detail=none);
"""

Number = TypeVar("Number", int, float)


class Rollout(NamedTuple):
    """One durable record of a slot: a trajectory, or a failure (``reward`` None)."""

    number: int
    task_group: str
    slot: int
    task_id: str
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
    """``add`` and ``update`` inside ``writing()``; the questions from any thread."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="rollmill-page-")
        self._writer = self._connect()
        self._writer.executescript(_SCHEMA)
        self.num_rollouts = 0

    def _connect(self) -> sqlite3.Connection:
        path = Path(self._directory.name) / "rollouts.sqlite"
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        db.execute("PRAGMA synchronous=OFF")  # it is made anew by every process
        db.execute("PRAGMA temp_store=MEMORY")
        db.row_factory = sqlite3.Row
        return db

    def close(self) -> None:
        self._writer.close()
        self._directory.cleanup()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A transaction."""
        self._writer.execute("BEGIN")
        try:
            yield
        finally:
            self._writer.execute("COMMIT")

    def add(self, rollout: Rollout, text: str) -> None:
        """``text``: what a search for words finds it by."""
        self._writer.execute(f"INSERT INTO rollouts VALUES ({', '.join('?' * len(rollout))})", rollout)
        self._writer.execute("INSERT INTO texts (rowid, text) VALUES (?, ?)", (rollout.number, text))
        self.num_rollouts += 1

    def update(self, task_group: str, outcomes: Iterable[tuple[int, str, int | None]]) -> None:
        """Set the fate and the training step of rollouts. ``outcomes``: slot, fate, step."""
        self._writer.executemany(
            "UPDATE rollouts SET fate = ?, step = ? WHERE task_group = ? AND slot = ?",
            [(fate, step, task_group, slot) for slot, fate, step in outcomes],
        )

    def _select(self, query: str, values: Iterable[Any] = ()) -> list[dict[str, Any]]:
        with closing(self._connect()) as db:
            return [dict(row) for row in db.execute(query, tuple(values))]

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
        words = _match(query.get("words", ""))
        with closing(self._connect()) as db:
            if words:  # once, in SQLite alone, and up to a bound: a common word is in most rollouts
                matches = "texts CROSS JOIN rollouts AS r ON r.number = texts.rowid WHERE texts MATCH ?"
                by_age = f"ORDER BY texts.rowid {'ASC' if order == 'oldest' else 'DESC'} LIMIT {MOST_FOUND + 1}"
                db.execute("CREATE TEMP TABLE found (number INTEGER PRIMARY KEY)")
                db.execute(f"INSERT INTO found SELECT r.number FROM {matches} AND {where} {by_age}", (words, *values))
                where, values = "r.number IN temp.found", []
            total = db.execute(f"SELECT COUNT(*) FROM rollouts AS r WHERE {where}", values).fetchone()[0]
            page = f"ORDER BY {ORDERS[order]} LIMIT {PAGE_ROWS} OFFSET {offset}"
            rows = [dict(row) for row in db.execute(f"SELECT r.* FROM rollouts AS r WHERE {where} {page}", values)]
        more = bool(words) and total > MOST_FOUND
        return {"total": MOST_FOUND if more else total, "more": more, "rows": rows}

    def one(self, number: int) -> dict[str, Any] | None:
        """The row of one rollout; None for a number that is not in the index."""
        return next(iter(self._select("SELECT * FROM rollouts WHERE number = ?", (number,))), None)

    def siblings(self, task_group: str) -> list[dict[str, Any]]:
        """The rollouts of a task group, by slot."""
        return self._select(
            "SELECT number, slot, reward FROM rollouts WHERE task_group = ? ORDER BY slot", (task_group,)
        )

    def facets(self) -> dict[str, Any]:
        """The values that filters can have: fates and evaluations with their counts."""
        counts = "SELECT {0} AS name, COUNT(*) AS found FROM rollouts GROUP BY {0} ORDER BY found DESC"
        return {
            f"{name}s": {row["name"]: row["found"] for row in self._select(counts.format(name))}
            for name in ("fate", "evaluation")
        }


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
        parts.append("r.task_id GLOB ?")  # which reads *, ? and [: only * is meant
        values.append("".join(f"[{sign}]" if sign in "?[" else sign for sign in task))
    return " AND ".join(parts) or "1", values


def _match(text: str) -> str:
    """A query of FTS5 for texts with all words, each the beginning of a term and quoted, so that FTS5 reads no syntax in it.

    >>> _match('two AND "seven-8')
    '"two"* AND "AND"* AND "seven"* AND "8"*'
    """
    words = _WORD.findall(text[:_MOST_CHARACTERS])[:_MOST_WORDS]
    return " AND ".join(f'"{word}"*' for word in words) or ('""' if text.strip() else "")
