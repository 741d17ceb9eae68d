"""Overlap of trainers' compute time and replicas' token generation.

Works on intervals of wall-clock time from the reports of peers. Intervals older than ``LIVE_S`` are folded into totals,
so a long run keeps little. A trainer reports a step at its end: the time since the last reported step of each policy stays,
up to ``LONGEST_STEP_S``. Pure; the caller passes the time in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from services.common.records.types import Interval

LIVE_S = 120.0
LONGEST_STEP_S = 3600.0


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint, in order.

    >>> merge([(3, 4), (0, 2), (1, 3)])
    [(0, 4)]
    """
    merged: list[Interval] = []
    for begin, end in sorted(i for i in intervals if i[1] > i[0]):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def clip(intervals: Iterable[Interval], begin: float, end: float) -> list[Interval]:
    return [(max(b, begin), min(e, end)) for b, e in intervals if e > begin and b < end]


def length(intervals: Iterable[Interval]) -> float:
    """Of disjoint intervals."""
    return sum(end - begin for begin, end in intervals)


def overlap(left: list[Interval], right: list[Interval]) -> float:
    """Seconds that lie in both; each list is disjoint and in order."""
    total, i, j = 0.0, 0, 0
    while i < len(left) and j < len(right):
        total += max(0.0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return total


class Timeline:
    def __init__(self) -> None:
        self._compute: dict[str, list[Interval]] = {}  # by policy
        self._emission: dict[str, list[Interval]] = {}  # by replica
        self._computed_until: dict[str, float] = {}  # by policy
        self._settled_until = 0.0
        self._compute_s = 0.0  # settled
        self._overlap_s = 0.0

    def totals(self) -> dict[str, float]:
        """Input of ``restore``; includes the intervals that are still live."""
        compute, both = self._live()
        return {"compute_s": self._compute_s + compute, "overlap_s": self._overlap_s + both}

    def restore(self, totals: Mapping[str, float]) -> None:
        self._compute_s = totals.get("compute_s", 0.0)
        self._overlap_s = totals.get("overlap_s", 0.0)

    def computed(self, policy: str, intervals: Iterable[Interval]) -> None:
        found = clip(intervals, self._settled_until, float("inf"))
        _add(self._compute, policy, found)
        self._computed_until[policy] = max([self._computed_until.get(policy, 0.0), *(end for _, end in found)])

    def emitted(self, replica_id: str, intervals: Iterable[Interval]) -> None:
        _add(self._emission, replica_id, clip(intervals, self._settled_until, float("inf")))

    @property
    def overlap_share(self) -> float:
        """Share of the trainers' compute time in which some replica emitted tokens; 0 without compute time."""
        totals = self.totals()
        return totals["overlap_s"] / totals["compute_s"] if totals["compute_s"] else 0.0

    def settle(self, now: float) -> None:
        """Fold old intervals into the totals; later reports about that time do not count."""
        reported = min(self._computed_until.values(), default=0.0)
        until = max(min(now - LIVE_S, reported), now - LONGEST_STEP_S)
        if until <= self._settled_until:
            return
        compute, both = self._live(until)
        self._compute_s += compute
        self._overlap_s += both
        self._settled_until = until
        for table in (self._compute, self._emission):
            for name in list(table):
                table[name] = clip(table[name], until, float("inf"))
                if not table[name]:
                    del table[name]

    def _live(self, until: float = float("inf")) -> tuple[float, float]:
        emission = merge(i for intervals in self._emission.values() for i in intervals)
        emission = clip(emission, 0.0, until)
        compute_s = overlap_s = 0.0
        for intervals in self._compute.values():
            compute = clip(intervals, 0.0, until)
            compute_s += length(compute)
            overlap_s += overlap(compute, emission)
        return compute_s, overlap_s


def _add(table: dict[str, list[Interval]], name: str, intervals: list[Interval]) -> None:
    merged = merge([*table.get(name, []), *intervals])
    if merged:  # intervals without length
        table[name] = merged
