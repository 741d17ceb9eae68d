"""One run of the page: a thread reads its directory on, and answers questions from the part that is read.

    metrics -> rows     journal -> model, index of rollouts, fates     orchestrator, while a browser is open -> its state

A question waits for no file that grows with the run and for no other process. A part that cannot be read is told by
its message; the others go on. Of a token that a policy wrote the page shows its text, log-probability, weight version and
advantage. The trainer computes advantages and records none; those that need the reward and the group alone are computed here
by its own function, others are named.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import orjson
import structlog

from extras.page.index import EVALUATION, FAILED, TEXT_CHARACTERS, TRAINED, WAITING, Rollout, RolloutIndex
from extras.page.state import Live, MetricsTail, events, state_of
from services.cli.inspect.fate import as_json, count_fates
from services.cli.inspect.run_model import OTHER_SHAPE, GroupFacts, Json, RunModel
from services.cli.inspect.run_state import Row as MetricsRow
from services.cli.inspect.standing import serving_s, standing, summarise
from services.cli.inspect.trajectories import (
    ENVIRONMENT,
    POLICY,
    PROMPT,
    Marks,
    expected,
    load_tokenizer,
    marks_of,
    read_turns,
)
from services.common import records as types
from services.common import run_files
from services.common.config.algorithm import AlgorithmConfig
from services.common.config.loading import load_resolved
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError, NotFoundError, RollmillError
from services.common.installing import install
from services.common.records import (
    TRANSFER_STAGES,
    GroupFate,
    Logprobs,
    Purpose,
    RolloutFailure,
    Segment,
    StopReason,
    TokenSource,
    TrainingSequence,
    Trajectory,
)
from services.common.telemetry.metrics import ReportedTransfer, RowKind
from services.orchestrator.groups import split_sequence_id
from services.orchestrator.journal import entries
from services.orchestrator.journal.entries import BatchEntry, BatchRecord
from services.orchestrator.journal.segments import Row

# --- texts of single tokens

_REPLACEMENT = "�"
_LONGEST = 8  # tokens of one character; more are not one
_ANCHORS = range(512)


class Pieces:
    """Texts of token ids by one tokenizer, so that the tokens of a turn can be told apart. Without one, ids are shown as
    numbers.

    A byte-level tokenizer may cut one character into several tokens, and then each alone decodes to the replacement
    sign: such tokens are decoded together, and the first of them has the text. A tokenizer may also drop the space
    before the first word of a text: so a token is decoded behind another one, whose text is then taken off.
    """

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}
        self._anchor = next((number for number in _ANCHORS if self._is_anchor(number)), None) if tokenizer else None

    def _is_anchor(self, number: int) -> bool:
        assert self._tokenizer is not None
        text = self._tokenizer.decode([number])
        return len(text) == 1 and text.isascii() and text.isalnum()

    @property
    def are_text(self) -> bool:
        return self._tokenizer is not None

    def of(self, ids: list[int]) -> list[str]:
        """One text for each token, whose sum is the text of all; empty for the later tokens of one character. [num_tokens]"""
        if self._tokenizer is None:
            return [f"[{token}] " for token in ids]
        texts = [self._alone(token) for token in ids]
        at = 0
        while at < len(texts):
            if _REPLACEMENT not in texts[at]:
                at += 1
                continue
            end, whole = self._character(ids, at)
            texts[at:end] = [whole, *[""] * (end - at - 1)]
            at = end
        return texts

    def _character(self, ids: list[int], begin: int) -> tuple[int, str]:
        """Where the tokens of a character end, and the text; of bytes that are no character, one token."""
        for end in range(begin + 2, min(begin + _LONGEST, len(ids)) + 1):
            whole = self._decoded(ids[begin:end])
            if _REPLACEMENT not in whole:
                return end, whole
        return begin + 1, self._alone(ids[begin])

    def _alone(self, token: int) -> str:
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._decoded([token])
        return found

    def _decoded(self, ids: list[int]) -> str:
        assert self._tokenizer is not None
        if self._anchor is None:
            return str(self._tokenizer.decode(list(ids)))
        return str(self._tokenizer.decode([self._anchor, *ids]))[1:]


# --- one conversation

TASK_CHARACTERS = 20_000  # of a task's row, which may hold all tests of a program


def conversation(
    trajectory: Trajectory, issue: Json, texts: Mapping[str, tuple[Pieces, Marks]], uses: Mapping[int, Json]
) -> Json:
    """``issue``: the journal's line of the task group, or empty. ``texts`` by policy; ``uses`` by position of the sequence: its use in a batch (``uses``)."""
    return {
        **{name: getattr(trajectory, name) for name in ("reward", "started_at", "finished_at", "metrics")},
        "task_group": trajectory.task_group_id,
        "slot": trajectory.index,
        "replica": trajectory.replica_id,
        "expected": expected(issue),
        "task_row": _task_row(issue),
        "sequences": [
            {
                **{name: getattr(sequence, name) for name in _OF_SEQUENCE},
                "origin": sequence.origin.value,
                "stop": sequence.stop_reason.value,
                "use": uses.get(position),
                "are_text": texts[sequence.policy][0].are_text,
                "turns": list(_turns(sequence.segments, *texts[sequence.policy])),
            }
            for position, sequence in enumerate(trajectory.sequences)
        ],
    }


_OF_SEQUENCE = ("policy", "role", "attempt", "parent", "reward", "metrics")


def _task_row(issue: Json) -> str:
    try:
        row = orjson.loads(issue.get("data_json", "{}"))
    except orjson.JSONDecodeError:
        return str(issue.get("data_json", ""))[:TASK_CHARACTERS]
    return orjson.dumps(row, option=orjson.OPT_INDENT_2).decode()[:TASK_CHARACTERS] if row else ""


def _turns(segments: Iterable[Segment], pieces: Pieces, marks: Marks) -> Iterator[Json]:
    parts = groupby(segments, key=lambda segment: segment.is_policy)
    for number, (by_policy, found) in enumerate(parts):
        if by_policy:
            yield _written(list(found), pieces)
            continue
        text = "".join("".join(pieces.of(segment.token_ids.tolist())) for segment in found)
        for turn in read_turns(text, marks, PROMPT if number == 0 else ENVIRONMENT):
            if turn.text:
                yield {"role": turn.role, "text": turn.text}


def _written(segments: list[Segment], pieces: Pieces) -> Json:
    """A turn of the policy. ``spans``: how many tokens a weight version sampled, in order."""
    ids: list[list[int]] = [segment.token_ids.tolist() for segment in segments]
    logprobs = [_rounded(segment.logprobs) for segment in segments]
    return {
        "role": POLICY,
        "tokens": pieces.of([token for part in ids for token in part]),
        "ids": [token for part in ids for token in part],
        "logprobs": [value for part in logprobs for value in part],
        "teacher_logprobs": [value for segment in segments for value in _rounded(segment.teacher_logprobs)],
        "spans": [
            {
                "tokens": len(part),
                "version": segment.weight_version,
                "temperature": segment.temperature,
                "mixed_cache": segment.mixed_cache,
            }
            for part, segment in zip(ids, segments, strict=True)
        ],
    }


def _rounded(values: Logprobs) -> list[float]:
    return [round(value, 5) for value in values.tolist()]


_OF_ENTRY = ("minibatch", "staleness", "group_mean", "group_std", "group_size", "trained_from")


def uses(
    trajectory: Trajectory, batches: Iterable[BatchRecord], algorithms: Mapping[str, AlgorithmConfig]
) -> dict[int, Json]:
    """By position of the sequence in the trajectory: training step, staleness, statistics of the group, and the
    ``advantage``, or ``why`` it is not known."""
    found: dict[int, Json] = {}
    for batch in batches:
        for entry in batch.entries:
            group, slot, position = split_sequence_id(entry.sequence_id)
            if (group, slot) != (trajectory.task_group_id, trajectory.index) or position in found:
                continue
            of_policy = algorithms.get(batch.policy)
            reward = entry.reward if entry.reward is not None else trajectory.sequences[position].reward
            advantage, why = (None, "its policy is not in the recipe")
            if of_policy is not None:
                advantage, why = _advantage(entry, reward, of_policy)
            found[position] = {
                "step": batch.training_step,
                **{key: getattr(entry, key) for key in _OF_ENTRY},
                "trained_reward": reward,
                "advantage": advantage,
                "why": why,
            }
    return found


def _advantage(entry: BatchEntry, reward: float, algorithm: AlgorithmConfig) -> tuple[float | None, str]:
    if algorithm.distillation is not None:
        return None, "the trainer computes it for each token from the teacher's log-probability"
    if algorithm.advantage == "gae":
        return None, "the trainer computes it for each token from the values of the critic"
    if algorithm.deviation == "batch":
        return None, "the trainer divides it by the deviation of its whole batch"
    try:
        from services.trainer.advantages import sequence_advantages
    except ImportError:  # a machine that only reads runs
        return None, "the trainer's packages are not installed here"
    sequence = types.TokenSequence(
        policy="", role="", attempt=0, segments=(), reward=reward, stop_reason=StopReason.STOP
    )
    stamped = TrainingSequence(
        sequence_id=entry.sequence_id, sequence=sequence, group_mean=entry.group_mean, group_std=entry.group_std,
        group_size=entry.group_size, staleness=0, minibatch=0, position=0,
    )  # fmt: skip
    note = "before the normalisation over the batch" if algorithm.batch_normalize_advantages else ""
    if algorithm.gamma != 1.0 or algorithm.kl_reward_coefficient:
        note = "of the last token: the trainer discounts it, or takes the KL off, for each token"
    return float(sequence_advantages([stamped], algorithm)[0]), note


log = structlog.get_logger()

LOOK_S = 1.0
WATCHED_S = 15.0  # after a question, for which the orchestrator is asked
FATES_SHARE = 10.0  # times the seconds that the last count of fates took: the least pause before the next
TEXT_S = 20.0  # that the first conversation waits for its tokenizer; then ids are shown
TRANSFERS = 100  # that are listed
CHUNK = 200
"""Records of one transaction: what a question to the same journal may wait for."""
_STOP_S = 10.0
_LOADING = threading.Lock()  # two threads that import transformers at once see half of it

UNREADABLE = (OSError, *OTHER_SHAPE, sqlite3.Error)
"""Errors of reading a file of another shape: JSON without a key, bytes that are no text, a disk with a read error."""


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
        self._model: RunModel | None = None
        self._is_complete = False
        self._tasks: dict[str, int] = {}  # task group -> its task in the index
        self._without_text: deque[Row] = deque()  # trajectories
        self._texts: dict[str, tuple[Pieces, Marks]] = {}  # by policy
        self._text_ready = threading.Event()
        self._live = Live(run_dir)
        self._asked_at = 0.0
        self._fates_of = -1  # the last record when fates were counted
        self._fates_again_at = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read_on, name=f"page-{run_dir.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join(_STOP_S)
        if self._model is not None:
            self._model.close()
        self._index.close()

    # --- questions ---------------------------------------------------------------------------------------------------

    def rows(self) -> list[MetricsRow]:
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

    def rollouts(self, query: Mapping[str, str]) -> Json:
        """Rollouts that match, and how far the index is."""
        return {**self._progress(), **self._index.list_(query)}  # the progress first: the rows are at least as new

    def facets(self) -> Json:
        """The values that filters can have, and how far the index is."""
        return {**self._progress(), **self._index.facets()}

    def _progress(self) -> Json:
        has_text = any(pieces.are_text for pieces, _ in self._texts.values())
        return {
            "indexed": self._index.num_rollouts,
            "complete": self._is_complete,
            "unreadable": self._model.num_unreadable if self._model else 0,
            "texts_searched": has_text and not self._without_text,
        }

    def conversation(self, number: int) -> Json:
        """One rollout. Raises ``NotFoundError``, and ``ConfigError`` for a record that cannot be read."""
        row = self._index.one(number)
        if row is None or self._model is None:
            raise NotFoundError(f"there is no rollout with the number {number} in {self.run_dir.name}")
        name, slot = row["task_group"], row["slot"]
        with self._model.lock:
            group, journal = self._model.groups[name], self._model.reader
            found = group.rows[slot]
            record = journal.load(found)
            issue = journal.find(entries.GROUP, [name]).get(name, {})
            of_slot = [entry.use for entry in group.entries if entry.slot == slot]
            keys = [entries.batch_key(use.policy, use.training_step) for use in of_slot]
            batches = list(journal.find(entries.BATCH, keys).values())
        if record is None:
            raise ConfigError(
                f"the record of {name}/{slot} cannot be read any more: retention has deleted it, or it is damaged "
                f"(rollmill journal {self.run_dir} verify)"
            )
        whole = {**row, "siblings": self._index.siblings(name), "texts_loading": False}
        if found.kind == entries.FAILURE:
            failure = entries.from_json(RolloutFailure, record)
            return {**whole, "failure": {"reason": failure.reason, "detail": failure.detail}}
        trajectory = entries.from_json(Trajectory, record)
        whole["texts_loading"] = not self._text_ready.wait(TEXT_S)
        without = Pieces(None), Marks({}, ())
        texts = {sequence.policy: self._texts.get(sequence.policy, without) for sequence in trajectory.sequences}
        algorithms = {} if self._recipe is None else {n: p.algorithm for n, p in self._recipe.policies.items()}
        used = uses(trajectory, (entries.from_json(BatchRecord, batch) for batch in batches), algorithms)
        return {**whole, **conversation(trajectory, issue, texts, used)}

    # --- the thread --------------------------------------------------------------------------------------------------

    def _read_on(self) -> None:
        while not self._ended.is_set():
            with self._part("run"):
                if self._recipe is None:
                    self._recipe = load_resolved(self.run_dir)
            if self._recipe is not None:
                with self._part("metrics"):
                    self._read_metrics(self._recipe)
                with self._part("rollouts"):
                    self._read_journal(self._recipe)
            self._ended.wait(LOOK_S)

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        """Keep the reason why a part cannot be read, in one sentence, until a read succeeds."""
        try:
            yield
            self.problems.pop(name, None)
            return
        except RollmillError as error:
            message = error.message
        except UNREADABLE as error:
            message = _unreadable(f"the {name} of {self.run_dir}", error)
        if self.problems.get(name) != message:
            log.warning("page.unreadable", run=str(self.run_dir), part=name, error=message)
        self.problems[name] = message

    def _read_metrics(self, recipe: Recipe) -> None:
        grown = self._tail.look()
        now = standing(self.run_dir, self.rows())
        watched = time.monotonic() - self._asked_at < WATCHED_S
        live = self._live.ask(now) if watched else None
        before = self.state
        if before and not grown and live is None and not before["is_live"] and before["stands"] == now.state:
            return
        self.events = events(self.run_dir, self.rows())
        self.state = {**state_of(now, self.rows(), live, recipe), "skipped_rows": self._tail.num_skipped}

    def _read_journal(self, recipe: Recipe) -> None:
        if self._model is None:
            self._model = RunModel(self.run_dir)
            threading.Thread(target=self._load_texts, args=(recipe,), name="page-tokenizers", daemon=True).start()
        for work in (self._fill, self._add_texts):
            more = True
            while more and not self._ended.is_set():
                with self._model.lock:
                    more = work(self._model)
        if self._model.last != self._fates_of and time.monotonic() >= self._fates_again_at and not self._ended.is_set():
            began = time.monotonic()
            with self._part("fates"):
                found = count_fates(self._model)
                self.fates = as_json(found, found.policies, None)
            self._fates_of = self._model.last
            self._fates_again_at = time.monotonic() + FATES_SHARE * (time.monotonic() - began)

    def _fill(self, model: RunModel) -> bool:
        """Index the next ``CHUNK`` records; False when there were fewer."""
        rows = list(islice(model.new_rows(), CHUNK))
        with self._index.writing():
            for row in rows:
                record = model.take(row)
                try:
                    if row.kind == entries.GROUP and record is not None:
                        self._tasks[row.key] = self._index.add_task(str(record["task_id"]), str(record["data_json"]))
                    elif row.kind in (entries.TRAJECTORY, entries.FAILURE):
                        self._add_rollout(model, row, record)
                except OTHER_SHAPE:
                    model.num_unreadable += 1
            for name in model.changed:
                self._index.update(name, _outcomes(model.groups[name]))
            model.changed.clear()
        self._is_complete = len(rows) < CHUNK
        return not self._is_complete

    def _add_rollout(self, model: RunModel, row: Row, record: Json | None) -> None:
        name, _, slot = row.key.rpartition("/")
        group = model.groups.get(name)
        if group is None or group.rows.get(int(slot)) != row:  # the first record of a slot counts
            return
        if row.kind == entries.TRAJECTORY:
            record = model.load(row)
            model.num_unreadable += record is None
        if record is None:
            return
        sequences = record.get("sequences", ())  # none of a failure
        written = [segment for _, segment in _written_by_policies(record)]
        self._index.add_rollout(
            Rollout(
                number=row.number,
                task_group=name,
                slot=int(slot),
                task=self._tasks.get(name, 0),
                evaluation=group.evaluation or ("" if group.purpose == Purpose.TRAIN else group.purpose),
                reward=float(record["reward"]) if row.kind == entries.TRAJECTORY else None,
                tokens=sum(int(segment["num_tokens"]) for segment in written),
                turns=sum(_num_turns(sequence["segments"]) for sequence in sequences),
                version=max((int(segment["weight_version"]) for segment in written), default=0),
                stop=str(sequences[-1]["stop_reason"] if sequences else record.get("reason", "")),
                written_at=row.written_at,
            )
        )
        if row.kind == entries.TRAJECTORY:
            self._without_text.append(row)
        else:
            self._index.add_text(row.number, f"{record['reason']} {record['detail']}")

    def _add_texts(self, model: RunModel) -> bool:
        """Add the next ``CHUNK`` texts, once the tokenizers are loaded; False when there were fewer."""
        if not self._text_ready.is_set():
            return False
        pieces = {policy: found for policy, (found, _) in self._texts.items() if found.are_text}
        part = list(islice(self._without_text, CHUNK))
        with self._index.writing():
            for row in part if pieces else ():
                try:
                    self._index.add_text(row.number, _text(model.load(row) or {}, pieces))
                except OTHER_SHAPE:
                    model.num_unreadable += 1
        for _ in part:  # after the commit: another thread reads how many wait
            self._without_text.popleft()
        return bool(self._without_text)

    def _load_texts(self, recipe: Recipe) -> None:
        """In a thread of its own: the import of the tokenizers' package takes seconds."""
        with _LOADING:
            for policy in recipe.policies:
                try:
                    tokenizer = load_tokenizer(policy, recipe.model_path(policy, self.run_dir))
                    self._texts[policy] = Pieces(tokenizer), marks_of(tokenizer)
                except ImportError as error:
                    self.problems["texts"] = f"texts need the package {error.name}: {install('page')}"
                except RollmillError as error:
                    self.problems["texts"] = error.message
        self._text_ready.set()


def _outcomes(group: GroupFacts) -> Iterator[tuple[int, str, int | None]]:
    """Slot, fate and first training step of the rollouts of a task group."""
    judged = {m.index: m.fate.value for v in group.verdicts for m in v.members if m.fate is not GroupFate.KEPT}
    steps: dict[int, int] = {}
    for entry in group.entries:
        steps.setdefault(entry.slot, entry.use.training_step)
    is_training = group.purpose == Purpose.TRAIN
    rest = (group.closed_reason or WAITING) if is_training else EVALUATION
    for slot in group.rows:
        fate = FAILED if slot in group.failures else TRAINED if slot in steps else judged.get(slot, rest)
        yield slot, fate, steps.get(slot)


def _written_by_policies(record: Json) -> Iterator[tuple[str, Json]]:
    """The segments that policies wrote, each with its policy."""
    for sequence in record.get("sequences", ()):
        for segment in sequence["segments"]:
            if segment["source"] == TokenSource.POLICY:
                yield sequence["policy"], segment


def _num_turns(segments: list[Json]) -> int:
    """Of the policy; a turn has a segment for each weight version."""
    return sum(by_policy for by_policy, _ in groupby(segments, lambda segment: segment["source"] == TokenSource.POLICY))


def _text(record: Json, pieces: Mapping[str, Pieces]) -> str:
    """The beginning of what policies wrote, as far as a search finds it; the rest is not decoded."""
    found = ""
    for policy, segment in _written_by_policies(record):
        if len(found) < TEXT_CHARACTERS and policy in pieces:
            ids = entries.unpack_tokens(segment["token_ids"], segment["num_tokens"]).tolist()
            found += "".join(pieces[policy].of(ids))
    return found


def _unreadable(what: str, error: Exception) -> str:
    return f"{what} cannot be read: {type(error).__name__}: {error}; is the run of this version?"


def guarded(what: str, ask: Callable[[], Json]) -> Json:
    """The answer to a question; raises ``ConfigError`` where the files behind it have another shape."""
    try:
        return ask()
    except UNREADABLE as error:
        raise ConfigError(_unreadable(what, error)) from None
