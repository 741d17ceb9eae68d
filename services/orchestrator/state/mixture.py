"""Shares of several sources of tasks among the sequences that one policy trains.

The level of a source is the number of its sequences that batches have taken, over its weight. The dispatcher issues the
source of the lowest level, with waiting and expected sequences counted too; a batch takes the task groups of the lowest
level one after another, and waits for a source without a task group while one may still come:

    issue   argmin (trained + waiting + expected) / weight
    batch   argmin  trained / weight, group by group

So the shares of trained sequences follow the weights within a task group, however slow a source is and however many of
its groups are dropped: a dropped group leaves the count, and its source is issued again (stride scheduling; Waldspurger
and Weihl, 1995).

A source of which ``exhausted_after`` task groups in a row were dropped is exhausted: batches do not wait for this source,
and sequences of other sources in its place do not count, so that the source does not displace the others later.
Independent of task groups, buffers and the journal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from services.common.telemetry.metrics import SourceKey, source_key

ONLY: Mapping[str, float] = {"": 1.0}  # weights of a run with one dataset


class Mixture:
    def __init__(self, weights: Mapping[str, float] = ONLY, exhausted_after: int = 100) -> None:
        """``weights``: by name of the source, above 0, in the order that breaks ties."""
        total = sum(weights.values())
        self.shares = {source: weight / total for source, weight in weights.items()}
        self._exhausted_after = exhausted_after
        self.trained: Counter[str] = Counter()  # sequences in batches
        self._forgiven: dict[str, float] = dict.fromkeys(weights, 0.0)
        self._slots: Counter[str] = Counter()  # of issued task groups that are not complete
        self._ended_slots: Counter[str] = Counter()
        self._ended_sequences: Counter[str] = Counter()
        self._dropped_in_a_row: Counter[str] = Counter()  # task groups

    @property
    def is_mixed(self) -> bool:
        return len(self.shares) > 1

    # --- issued task groups ------------------------------------------------------------------------------------------

    def issued(self, source: str, num_slots: int) -> None:
        self._slots[source] += num_slots

    def ended(self, source: str, num_slots: int, num_sequences: int | None = None) -> None:
        """Count the end of a task group with ``num_sequences``; None for a cancelled one."""
        self._slots[source] -= num_slots
        assert self._slots[source] >= 0
        if num_sequences is not None:
            self._ended_slots[source] += num_slots
            self._ended_sequences[source] += num_sequences

    def is_running(self, source: str) -> bool:
        """Whether a task group of the source is not complete."""
        return self._slots[source] > 0

    def expected(self, source: str) -> float:
        """Sequences of its running task groups, from the mean of earlier ones."""
        ended = self._ended_slots[source]
        return self._slots[source] * (self._ended_sequences[source] / ended if ended else 1.0)

    def kept(self, source: str) -> None:
        """Note a task group with sequences to train."""
        self._dropped_in_a_row[source] = 0

    def dropped(self, source: str, num_sequences: int) -> bool:
        """Note a task group without a sequence to train; returns whether the source is now exhausted."""
        self._dropped_in_a_row[source] += 1
        if self.is_exhausted(source):  # its turn is over, so that the others are issued too
            self._forgiven[source] += num_sequences
        return self._dropped_in_a_row[source] == self._exhausted_after

    def is_exhausted(self, source: str) -> bool:
        return self._dropped_in_a_row[source] >= self._exhausted_after

    @property
    def exhausted(self) -> dict[str, int]:
        """Exhausted sources of a mixture, and how many of their task groups were dropped in a row."""
        return {s: self._dropped_in_a_row[s] for s in self.shares if self.is_mixed and self.is_exhausted(s)}

    def level(self, source: str, more: float = 0.0) -> float:
        """Trained sequences and ``more`` of them, over the share of the source."""
        return (self.trained[source] + self._forgiven[source] + more) / self.shares[source]

    # --- batches -----------------------------------------------------------------------------------------------------

    def plan(
        self, batch_size: int, waiting: Mapping[str, Sequence[int]], may_come: Callable[[str], bool]
    ) -> tuple[list[str], str]:
        """The sources of the task groups of the next batch, in order, and the source that the batch waits for.

        ``waiting``: sizes of the waiting groups of each source, in their order. Without a plan the list is empty; the
        source is empty too where there are too few sequences of all.
        """
        more: Counter[str] = Counter()
        left = {source: iter(waiting.get(source, ())) for source in self.shares}
        plan: list[str] = []
        count = 0
        while count < batch_size:
            if not left:
                return [], ""
            source = min(left, key=lambda source: self.level(source, more[source]))
            size = next(left[source], None)
            if size is None:
                if not self.is_exhausted(source) and may_come(source):
                    return [], source
                del left[source]
                continue
            plan.append(source)
            more[source] += size
            count += size
        return plan, ""

    def taken(self, num_sequences: Mapping[str, int]) -> None:
        """Count the sequences of a batch by source."""
        self.trained.update(num_sequences)
        active = [source for source in self.shares if not self.is_exhausted(source)]
        if active and self.exhausted:
            lowest = min(map(self.level, active))
            for source in self.exhausted:
                lacking = (lowest - self.level(source)) * self.shares[source]
                self._forgiven[source] += max(0.0, lacking)

    def facts(self, num_sequences: Mapping[str, int]) -> dict[str, float]:
        """What a batch's record keeps of the mixture after ``taken``; empty for one source."""
        if not self.is_mixed:
            return {}
        total = self.trained.total()
        values = {}
        for source in self.shares:
            values[source_key(source, SourceKey.NUM_SEQUENCES)] = float(num_sequences.get(source, 0))
            values[source_key(source, SourceKey.SHARE)] = self.trained[source] / total if total else 0.0
            values[source_key(source, SourceKey.WANTED_SHARE)] = self.shares[source]
            values[source_key(source, SourceKey.FORGIVEN)] = self._forgiven[source]
        return values

    def recover(self, statistics: Mapping[str, float]) -> None:
        """Apply the facts of a batch that an earlier process recorded."""
        for source in self.shares:
            self.trained[source] += int(statistics.get(source_key(source, SourceKey.NUM_SEQUENCES), 0))
            self._forgiven[source] = statistics.get(source_key(source, SourceKey.FORGIVEN), self._forgiven[source])
