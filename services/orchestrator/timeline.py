"""When trainers computed and replicas emitted tokens: how much of it happened at the same time.

Works on stretches of wall-clock time as peers report them. Stretches older than ``LIVE_S`` are folded into totals, so a
long run keeps little. Pure; time is passed in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

Stretch = tuple[float, float]  # begin, end: seconds since the epoch

LIVE_S = 120.0


def merge(stretches: Iterable[Stretch]) -> list[Stretch]:
    """Disjoint, in order.

    >>> merge([(3, 4), (0, 2), (1, 3)])
    [(0, 4)]
    """
    merged: list[Stretch] = []
    for begin, end in sorted(s for s in stretches if s[1] > s[0]):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def clip(stretches: Iterable[Stretch], begin: float, end: float) -> list[Stretch]:
    return [(max(b, begin), min(e, end)) for b, e in stretches if e > begin and b < end]


def length(stretches: Iterable[Stretch]) -> float:
    """Of disjoint stretches."""
    return sum(end - begin for begin, end in stretches)


def overlap(left: list[Stretch], right: list[Stretch]) -> float:
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
        self._compute: dict[str, list[Stretch]] = {}  # by policy
        self._emission: dict[str, list[Stretch]] = {}  # by replica
        self._settled_until = 0.0
        self._compute_s = 0.0  # settled
        self._overlap_s = 0.0

    def totals(self) -> dict[str, float]:
        """What ``restore`` needs; stretches still live are counted in."""
        compute, both = self._live()
        return {"compute_s": self._compute_s + compute, "overlap_s": self._overlap_s + both}

    def restore(self, totals: Mapping[str, float]) -> None:
        self._compute_s = totals.get("compute_s", 0.0)
        self._overlap_s = totals.get("overlap_s", 0.0)

    def computed(self, policy: str, stretches: Iterable[Stretch]) -> None:
        _add(self._compute, policy, clip(stretches, self._settled_until, float("inf")))

    def emitted(self, replica_id: str, stretches: Iterable[Stretch]) -> None:
        _add(self._emission, replica_id, clip(stretches, self._settled_until, float("inf")))

    @property
    def overlap_share(self) -> float:
        """Share of the trainers' compute time in which some replica emitted tokens; 0 when nothing was computed."""
        totals = self.totals()
        return totals["overlap_s"] / totals["compute_s"] if totals["compute_s"] else 0.0

    def settle(self, now: float) -> None:
        """Fold what is older than ``LIVE_S`` into the totals; what arrives later about that time is not counted."""
        until = now - LIVE_S
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
        emission = merge(s for stretches in self._emission.values() for s in stretches)
        emission = clip(emission, 0.0, until)
        compute_s = overlap_s = 0.0
        for stretches in self._compute.values():
            compute = clip(stretches, 0.0, until)
            compute_s += length(compute)
            overlap_s += overlap(compute, emission)
        return compute_s, overlap_s


def _add(table: dict[str, list[Stretch]], name: str, stretches: list[Stretch]) -> None:
    merged = merge([*table.get(name, []), *stretches])
    if merged:  # stretches without length leave nothing
        table[name] = merged
