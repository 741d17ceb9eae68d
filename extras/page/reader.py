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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import orjson
import structlog

from extras.page.index import EVALUATION, FAILED, TRAINED, WAITING, Rollout, RolloutIndex
from extras.page.state import Live, MetricsTail, events, state_of
from services.cli.inspect.fate import as_json, count_fates
from services.cli.inspect.run_model import OTHER_SHAPE, GroupFacts, Json, RunModel
from services.cli.inspect.run_state import Row as MetricsRow
from services.cli.inspect.standing import arrivals, standing, summarise
from services.cli.inspect.trajectories import (
    ENVIRONMENT,
    POLICY,
    PROMPT,
    Ids,
    Marks,
    expected,
    load_tokenizer,
    marks_of,
    read_turns,
)
from services.common import run_files
from services.common.config.algorithm import AlgorithmConfig
from services.common.config.loading import load_resolved
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError, NotFoundError, RollmillError
from services.common.installing import install
from services.common.records import (
    TRANSFER_STAGES,
    GroupFate,
    Purpose,
    RolloutFailure,
    Segment,
    StopReason,
    TokenSequence,
    TokenSource,
    TrainingSequence,
    Trajectory,
)
from services.orchestrator.groups import split_sequence_id
from services.orchestrator.journal import entries
from services.orchestrator.journal.entries import BatchEntry, BatchRecord
from services.orchestrator.journal.segments import Row

# --- one conversation

_REPLACEMENT = "�"
_LONGEST = 8  # tokens of one character; more are not one
TASK_CHARACTERS = 20_000  # of a task's row that are shown, for it may hold all tests of a program

Texts = Mapping[str, tuple[Any, Marks]]
"""By policy: its tokenizer, or ``Ids``, and the marks of its chat template."""


def token_texts(tokenizer: Any, ids: list[int]) -> list[str]:
    """One text for each token, whose sum is the text of all. [num_tokens]

    A byte-level tokenizer may cut one character into several tokens, and each alone decodes to the replacement sign: the
    last of them has the text, and the others are empty. A tokenizer may also drop the space before the first word of a
    text, so a token is decoded behind the one before it, whose text is then taken off.
    """
    if isinstance(tokenizer, Ids):
        return [tokenizer.decode([token]) for token in ids]
    texts = [""] * len(ids)
    before = at = 0  # the token before the next character, and the first token of that
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[before:end])[len(tokenizer.decode(ids[before:at])) :]
        if not text.endswith(_REPLACEMENT) or end - at == _LONGEST or end == len(ids):
            texts[end - 1] = text
            before, at = at, end
    return texts


def conversation(trajectory: Trajectory, issue: Json, texts: Texts, uses: Mapping[int, Json]) -> Json:
    """``issue``: the journal's line of the task group, or empty. ``uses``: by position of the sequence, its use in a batch."""
    return {
        **{name: getattr(trajectory, name) for name in ("reward", "started_at", "finished_at", "metrics")},
        "replica": trajectory.replica_id,
        "expected": expected(issue),
        "task_row": _task_row(issue),
        "sequences": [
            {
                **{name: getattr(sequence, name) for name in _OF_SEQUENCE},
                "origin": sequence.origin.value,
                "stop": sequence.stop_reason.value,
                "use": uses.get(position),
                "are_text": not isinstance(texts[sequence.policy][0], Ids),
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


def _turns(segments: Iterable[Segment], tokenizer: Any, marks: Marks) -> Iterator[Json]:
    for number, (by_policy, found) in enumerate(groupby(segments, key=lambda segment: segment.is_policy)):
        if by_policy:
            yield _written(list(found), tokenizer)
            continue
        text = "".join(tokenizer.decode(segment.token_ids.tolist()) for segment in found)
        for turn in read_turns(text, marks, PROMPT if number == 0 else ENVIRONMENT):
            yield {"role": turn.role, "text": turn.text}


def _written(segments: list[Segment], tokenizer: Any) -> Json:
    """A turn of the policy. ``spans``: how many tokens a weight version sampled, in order."""
    ids = [token for segment in segments for token in segment.token_ids.tolist()]
    return {
        "role": POLICY,
        "tokens": token_texts(tokenizer, ids),
        "ids": ids,
        "logprobs": [round(value, 5) for segment in segments for value in segment.logprobs.tolist()],
        "teacher_logprobs": [round(value, 5) for segment in segments for value in segment.teacher_logprobs.tolist()],
        "spans": [
            {
                "tokens": s.num_tokens,
                "version": s.weight_version,
                "temperature": s.temperature,
                "mixed_cache": s.mixed_cache,
            }
            for s in segments
        ],
    }


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
            reward = entry.reward if entry.reward is not None else trajectory.sequences[position].reward
            advantage, why = _advantage(entry, reward, algorithms[batch.policy])
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
    sequence = TokenSequence(policy="", segments=(), reward=reward, stop_reason=StopReason.STOP)
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
TRANSFERS = 100  # that are listed
CHUNK = 200
"""Records of one transaction: what a question to the same journal may wait for."""
SEARCHED = 2_000, 20_000
"""Characters of a task's row, and of what a policy wrote in a rollout, that a search finds."""
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
        self._tasks: dict[str, tuple[str, str]] = {}  # task group with open slots -> its task, and the words of that
        self._texts: dict[str, tuple[Any, Marks]] = {}
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
        found = arrivals(self.rows())
        return {
            "stages": list(TRANSFER_STAGES),
            "replicas": summarise(found),
            "transfers": [
                {
                    **one.row,
                    "serving_s": None if one.transfer.error else one.serving_s,
                    "bits_per_change": one.transfer.bits_per_change if one.transfer.num_changes else None,
                }
                for one in found[-TRANSFERS:]
            ],
            "total": len(found),
        }

    def rollouts(self, query: Mapping[str, str]) -> Json:
        """Rollouts that match, and how far the index is."""
        return {**self._progress(), **self._index.list_(query)}  # the progress first: the rows are at least as new

    def facets(self) -> Json:
        """The values that filters can have, and how far the index is."""
        return {**self._progress(), **self._index.facets()}

    def _progress(self) -> Json:
        return {
            "indexed": self._index.num_rollouts,
            "complete": self._is_complete,
            "unreadable": self._model.num_unreadable if self._model else 0,
            "texts_searched": any(not isinstance(tokenizer, Ids) for tokenizer, _ in self._texts.values()),
        }

    def conversation(self, number: int) -> Json:
        """One rollout. Raises ``NotFoundError``, and ``ConfigError`` for a record that cannot be read."""
        row = self._index.one(number)
        if row is None or self._model is None:
            raise NotFoundError(f"there is no rollout with the number {number} in {self.run_dir.name}")
        name, slot = row["task_group"], row["slot"]
        with self._model.lock:
            group, journal = self._model.groups[name], self._model.reader
            found = group.slots[slot].row
            record = journal.load(found) if found is not None else None
            issue = journal.find(entries.GROUP, [name]).get(name, {})
            of_slot = [entry.use for entry in group.entries if entry.slot == slot]
            keys = [entries.batch_key(use.policy, use.training_step) for use in of_slot]
            batches = list(journal.find(entries.BATCH, keys).values())
        if record is None:
            raise ConfigError(
                f"the record of {name}/{slot} cannot be read any more: retention has deleted it, or it is damaged "
                f"(rollmill journal {self.run_dir} verify)"
            )
        whole = {**row, "siblings": self._index.siblings(name)}
        if group.slots[slot].failure:
            failure = entries.from_json(RolloutFailure, record)
            return {**whole, "failure": {"reason": failure.reason, "detail": failure.detail}}
        trajectory = entries.from_json(Trajectory, record)
        assert self._recipe is not None
        algorithms = {name: policy.algorithm for name, policy in self._recipe.policies.items()}
        used = uses(trajectory, (entries.from_json(BatchRecord, batch) for batch in batches), algorithms)
        return {**whole, **conversation(trajectory, issue, self._texts, used)}

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
            model = RunModel(self.run_dir)
            self._load_texts(recipe)
            self._model = model
        while not self._ended.is_set() and self._fill(self._model):
            pass
        if self._model.last != self._fates_of and time.monotonic() >= self._fates_again_at and not self._ended.is_set():
            began = time.monotonic()
            with self._part("fates"):
                found = count_fates(self._model)
                self.fates = as_json(found, found.policies, None)
            self._fates_of = self._model.last
            self._fates_again_at = time.monotonic() + FATES_SHARE * (time.monotonic() - began)

    def _fill(self, model: RunModel) -> bool:
        """Index the next ``CHUNK`` records; False when there were fewer."""
        with model.lock, self._index.writing():
            rows = list(islice(model.new_rows(), CHUNK))
            for row in rows:
                record = model.take(row)
                try:
                    if row.kind == entries.GROUP and record is not None:
                        row_of_task = str(record["data_json"])[: SEARCHED[0]]
                        self._tasks[row.key] = str(record["task_id"]), f"{record['task_id']} {row_of_task}"
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
        if group is None or group.slots[int(slot)].row != row:  # the first record of a slot counts
            return
        if row.kind == entries.TRAJECTORY:
            record = model.load(row)
            model.num_unreadable += record is None
        if record is None:
            return
        task_id, text = self._tasks.get(name, ("", ""))
        if len(group.slots) == group.num_slots:
            self._tasks.pop(name, None)
        sequences = record.get("sequences", ())  # none of a failure
        # A turn of the policy has a segment for each weight version.
        turns = [groupby(s["segments"], lambda segment: segment["source"] == TokenSource.POLICY) for s in sequences]
        written = [
            (s["policy"], one) for s in sequences for one in s["segments"] if one["source"] == TokenSource.POLICY
        ]
        is_failure = row.kind == entries.FAILURE
        said = f"{record['reason']} {record['detail']}" if is_failure else self._said(written)
        self._index.add(
            Rollout(
                number=row.number,
                task_group=name,
                slot=int(slot),
                task_id=task_id,
                evaluation=group.evaluation or ("" if group.purpose == Purpose.TRAIN else group.purpose),
                reward=None if is_failure else float(record["reward"]),
                tokens=sum(int(segment["num_tokens"]) for _, segment in written),
                turns=sum(by_policy for of_sequence in turns for by_policy, _ in of_sequence),
                version=max((int(segment["weight_version"]) for _, segment in written), default=0),
                stop=str(sequences[-1]["stop_reason"] if sequences else record.get("reason", "")),
                written_at=row.written_at,
            ),
            f"{text} {said}",
        )

    def _said(self, written: list[tuple[str, Json]]) -> str:
        """The beginning of what policies wrote, as far as a search finds it; the rest is not decoded."""
        found = ""
        for policy, segment in written:
            tokenizer = self._texts[policy][0]
            if len(found) < SEARCHED[1] and not isinstance(tokenizer, Ids):
                ids = entries.unpack_tokens(segment["token_ids"], segment["num_tokens"]).tolist()
                # Of transformers' own decode half the time goes into a look at every id.
                found += getattr(tokenizer, "backend_tokenizer", tokenizer).decode(ids, skip_special_tokens=False)
        return found[: SEARCHED[1]]

    def _load_texts(self, recipe: Recipe) -> None:
        for policy in recipe.policies:
            self._texts[policy] = Ids(), Marks({}, ())
            try:
                with _LOADING:
                    tokenizer = load_tokenizer(policy, recipe.model_path(policy, self.run_dir))
                self._texts[policy] = tokenizer, marks_of(tokenizer)
            except ImportError as error:
                self.problems["texts"] = f"texts need the package {error.name}: {install('page')}"
            except RollmillError as error:
                self.problems["texts"] = error.message


def _outcomes(group: GroupFacts) -> Iterator[tuple[int, str, int | None]]:
    """Slot, fate and first training step of the rollouts of a task group."""
    judged = {m.index: m.fate.value for v in group.verdicts for m in v.members if m.fate is not GroupFate.KEPT}
    steps: dict[int, int] = {}
    for entry in group.entries:
        steps.setdefault(entry.slot, entry.use.training_step)
    is_training = group.purpose == Purpose.TRAIN
    rest = (group.closed_reason or WAITING) if is_training else EVALUATION
    for slot, resolved in group.slots.items():
        fate = FAILED if resolved.failure else TRAINED if slot in steps else judged.get(slot, rest)
        yield slot, fate, steps.get(slot)


def _unreadable(what: str, error: Exception) -> str:
    return f"{what} cannot be read: {type(error).__name__}: {error}; is the run of this version?"


def guarded(what: str, ask: Callable[[], Json]) -> Json:
    """The answer to a question; raises ``ConfigError`` where the files behind it have another shape."""
    try:
        return ask()
    except UNREADABLE as error:
        raise ConfigError(_unreadable(what, error)) from None
