"""One run of the page: a thread reads its directory on, and answers questions from the part that is read.

    metrics -> rows     journal -> index of rollouts, fates     orchestrator, while a browser is open -> its state

A question waits for no file that grows with the run and for no other process. A part that cannot be read is told by
its message; the others go on.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog

from services.cli.inspect.fate.reading import read_fates
from services.cli.inspect.fate.view import as_json
from services.cli.inspect.run_state import Row
from services.cli.inspect.standing import standing
from services.cli.inspect.trace.reading import open_journal
from services.cli.inspect.trajectories import load_tokenizer
from services.cli.inspect.turns import Marks, marks_of
from services.cli.inspect.weights import serving_s, summarise
from services.cli.page.conversation import Pieces, conversation, uses
from services.cli.page.events import MetricsTail, events
from services.cli.page.filling import Filler
from services.cli.page.filters import Filter
from services.cli.page.index import RolloutIndex
from services.cli.page.state import Live, state_of
from services.common import run_files
from services.common.config.reading.loading import load_resolved
from services.common.config.recipe import Recipe
from services.common.config.training.algorithm import AlgorithmConfig
from services.common.errors import ConfigError, NotFoundError, RollmillError
from services.common.installing import install
from services.common.records.types import TRANSFER_STAGES
from services.common.telemetry.metrics import RowKind
from services.common.telemetry.weight_transfers import ReportedTransfer
from services.orchestrator.journal import records, rollouts
from services.orchestrator.journal.reader import JournalReader

log = structlog.get_logger()

LOOK_S = 1.0
WATCHED_S = 15.0  # after a question, for which the orchestrator is asked
FATES_SHARE = 10.0  # times the seconds that the last count of fates took: the least pause before the next
TEXT_S = 20.0  # that the first conversation waits for its tokenizer; then ids are shown
TRANSFERS = 100  # that are listed
_STOP_S = 10.0
_LOADING = threading.Lock()  # two threads that import transformers at once see half of it

UNREADABLE = (OSError, ValueError, TypeError, KeyError, AttributeError, IndexError, sqlite3.Error)
"""Errors of reading a file of another shape: JSON without a key, bytes that are no text, a disk with a read error."""

Json = dict[str, Any]


class RunReader:
    """``start``; then the questions, from any thread; then ``close``."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.problems: dict[str, str] = {}
        """By part of the page: why it cannot be shown."""
        self.state: Json | None = None
        self.fates: Json | None = None
        self.events: list[Json] = []
        self._recipe: Recipe | None = None
        self._tail = MetricsTail(run_files.metrics(run_dir))
        self._index = RolloutIndex()
        self._journal: JournalReader | None = None
        self._journal_lock = threading.Lock()
        self._filler: Filler | None = None
        self._texts: dict[str, tuple[Pieces, Marks]] | None = None  # by policy; None until tokenizers are loaded
        self._loading: threading.Thread | None = None
        self._live = Live(run_dir)
        self._asked_at = 0.0
        self._fates_of = -1  # the last record when fates were counted
        self._fates_again_at = 0.0
        self._text_ready = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read_on, name=f"page-{run_dir.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join(_STOP_S)
        if self._journal is not None:
            self._journal.close()
        self._index.close()

    # --- questions ---------------------------------------------------------------------------------------------------

    def rows(self) -> list[Row]:
        """The rows of the metrics so far."""
        return self._tail.rows

    def asked(self) -> None:
        """Note that a browser has the page open."""
        self._asked_at = time.monotonic()

    def overview(self) -> Json:
        """The state of the run; the first one may take a moment."""
        return {"state": self.state, "why_not_live": self._live.why, "problems": self.problems}

    def weights(self) -> Json:
        """The transfers of weight versions to replicas."""
        rows = [row for row in self.rows() if row["kind"] == RowKind.WEIGHT_TRANSFER]
        transfers = [(ReportedTransfer.from_row(row).transfer, row) for row in rows]
        newest = sorted(transfers, key=lambda found: found[0].started_at)[-TRANSFERS:]
        return {
            "stages": list(TRANSFER_STAGES),
            "replicas": summarise(rows),
            "transfers": [
                {
                    **row,
                    "serving_s": None if found.error else serving_s(found),
                    "bits_per_change": found.bits_per_change if found.num_changes and not found.error else None,
                }
                for found, row in newest
            ],
            "total": len(rows),
        }

    def rollouts(self, wanted: Filter) -> Json:
        """Rollouts that match, and how far the index is."""
        return {**self._progress(), **self._index.list_(wanted)}  # the progress first: the rows are at least as new

    def facets(self) -> Json:
        """The values that filters can have, and how far the index is."""
        return {**self._progress(), **self._index.facets()}

    def _progress(self) -> Json:
        done = self._filler is not None and self._filler.is_complete
        waiting = self._filler.num_without_text if self._filler is not None else 0
        return {
            "indexed": self._index.num_rollouts,
            "complete": done,
            "unreadable": self._filler.num_unreadable if self._filler else 0,
            "texts_searched": not waiting and any(pieces.are_text for pieces, _ in (self._texts or {}).values()),
        }

    def conversation(self, number: int) -> Json:
        """One rollout. Raises ``NotFoundError``, and ``ConfigError`` for a record that cannot be read."""
        row = self._index.one(number)
        if row is None or self._journal is None:
            raise NotFoundError(f"there is no rollout with the number {number} in {self.run_dir.name}")
        group, slot = row["task_group"], row["slot"]
        with self._journal_lock:
            found = next(self._journal.select("r.number = ?", (number,), lambda r: r.number == number), None)
            record = self._journal.load(found) if found is not None else None
            issue = self._journal.find(records.GROUP, [group]).get(group, {})
            keys = [records.batch_key(policy, step) for policy, step in self._index.uses(group, slot)]
            batches = list(self._journal.find(records.BATCH, keys).values())
        if record is None:
            raise ConfigError(
                f"the record of {group}/{slot} cannot be read any more: retention has deleted it, or it is damaged "
                f"(rollmill journal {self.run_dir} check)"
            )
        whole = {**row, "siblings": self._index.siblings(group), "texts_loading": False}
        if found is not None and found.kind == records.FAILURE:
            failure = rollouts.failure_from_json(record)
            return {**whole, "failure": {"reason": failure.reason, "detail": failure.detail}}
        trajectory = rollouts.trajectory_from_json(record)
        whole["texts_loading"] = not self._text_ready.wait(TEXT_S)
        texts = {sequence.policy: self._text(sequence.policy) for sequence in trajectory.sequences}
        algorithms: dict[str, AlgorithmConfig] = (
            {} if self._recipe is None else {n: p.algorithm for n, p in self._recipe.policies.items()}
        )
        used = uses(trajectory, map(records.batch_from_json, batches), algorithms)
        return {**whole, **conversation(trajectory, issue, texts, used)}

    def _text(self, policy: str) -> tuple[Pieces, Marks]:
        return (self._texts or {}).get(policy) or (Pieces(None), Marks({}, ()))

    # --- the thread --------------------------------------------------------------------------------------------------

    def _read_on(self) -> None:
        while not self._ended.is_set():
            with self._part("run"):
                if self._recipe is None:
                    self._recipe = load_resolved(self.run_dir)
            with self._part("metrics"):
                self._read_metrics()
            with self._part("rollouts"):
                self._read_journal()
            self._ended.wait(LOOK_S)

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        """Keep the reason why a part cannot be read, in one sentence, until a read succeeds."""
        try:
            yield
            self.problems.pop(name, None)
        except RollmillError as error:
            self._note(name, error.message)
        except UNREADABLE as error:
            self._note(
                name,
                f"the {name} of {self.run_dir} cannot be read: {type(error).__name__}: {error}; is it of this version?",
            )

    def _note(self, name: str, message: str) -> None:
        if self.problems.get(name) != message:
            log.warning("page.unreadable", run=str(self.run_dir), part=name, error=message)
        self.problems[name] = message

    def _read_metrics(self) -> None:
        if self._recipe is None:
            return
        grown = self._tail.look()
        now = standing(self.run_dir, self.rows())
        watched = time.monotonic() - self._asked_at < WATCHED_S
        live = self._live.ask(now) if watched else None
        before = self.state
        if (
            before is not None
            and not grown
            and live is None
            and not before["is_live"]
            and before["stands"] == now.state
        ):
            return
        self.events = events(self.run_dir, self.rows())
        self.state = {
            **state_of(now, self.rows(), live, self._recipe),
            "skipped_rows": self._tail.num_skipped,
        }

    def _read_journal(self) -> None:
        if self._recipe is None:
            return
        if self._journal is None:
            self._journal = open_journal(self.run_dir)
            self._filler = Filler(self._journal, self._index, self._pieces)
            self._loading = threading.Thread(target=self._load_texts, name="page-tokenizers", daemon=True)
            self._loading.start()
        assert self._filler is not None
        for work in (self._filler.fill, self._filler.add_texts):
            more = True
            while more and not self._ended.is_set():
                with self._journal_lock:
                    more = work()
        self._count_fates(self._filler.done)

    def _pieces(self) -> dict[str, Pieces] | None:
        return None if self._texts is None else {name: p for name, (p, _) in self._texts.items() if p.are_text}

    def _load_texts(self) -> None:
        """In a thread of its own: the import of the tokenizers' package takes seconds."""
        assert self._recipe is not None
        with _LOADING:
            self._texts = {name: self._load_text(name, self._recipe) for name in self._recipe.policies}
        self._text_ready.set()

    def _load_text(self, policy: str, recipe: Recipe) -> tuple[Pieces, Marks]:
        try:
            tokenizer = load_tokenizer(policy, recipe.model_path(policy, self.run_dir))
        except ImportError as error:
            self.problems["texts"] = f"texts need the package {error.name}: {install('page')}"
        except RollmillError as error:
            self.problems["texts"] = error.message
        else:
            return Pieces(tokenizer), marks_of(tokenizer)
        return Pieces(None), Marks({}, ())

    def _count_fates(self, last: int) -> None:
        if last == self._fates_of or time.monotonic() < self._fates_again_at or self._ended.is_set():
            return
        began = time.monotonic()
        with self._part("fates"):
            found = read_fates(self.run_dir)
            self.fates = as_json(found, found.policies, None)
        self._fates_of = last
        self._fates_again_at = time.monotonic() + FATES_SHARE * (time.monotonic() - began)


def guarded(what: str, ask: Callable[[], Json]) -> Json:
    """The answer to a question; raises ``ConfigError`` where the files behind it have another shape."""
    try:
        return ask()
    except UNREADABLE as error:
        raise ConfigError(
            f"{what} cannot be read: {type(error).__name__}: {error}; is the run of this version?"
        ) from None
