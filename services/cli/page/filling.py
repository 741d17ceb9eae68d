"""Fills the index of a run from its journal, a bounded number of records at a time, and goes on where it stopped.

task_groups -> task, evaluation    trajectories, failures -> a rollout    verdicts, batches -> its fate, its step
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import groupby, islice
from typing import Any

from services.cli.page.conversation import Pieces
from services.cli.page.index import FAILED, WAITING, Rollout, RolloutIndex, joined
from services.common.records.fates import GroupFate
from services.common.records.types import Purpose, TokenSource
from services.orchestrator.journal import records, rollouts
from services.orchestrator.journal.reader import JournalReader
from services.orchestrator.journal.segments import Row
from services.orchestrator.state.groups import split_sequence_id

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
