"""Rows of a dataset without a usable task: their count, and the reasons of the first."""

from __future__ import annotations

from dataclasses import dataclass, field

NUM_REASONS = 3
_MAX_REASON_CHARS = 300


@dataclass(slots=True)
class SkippedRows:
    """Counts rows and keeps the reasons of the first three.

    >>> left_out = SkippedRows()
    >>> for number in range(2, 7):
    ...     left_out.add(f"row {number}: no answer")
    >>> str(left_out)
    'row 2: no answer; row 3: no answer; row 4: no answer; and 2 more'
    """

    count: int = 0
    reasons: list[str] = field(default_factory=list)

    def add(self, reason: str) -> None:
        self.count += 1
        if len(self.reasons) < NUM_REASONS:
            cut = len(reason) > _MAX_REASON_CHARS
            self.reasons.append(reason[: _MAX_REASON_CHARS - 3] + "..." if cut else reason)

    def __str__(self) -> str:
        more = self.count - len(self.reasons)
        return "; ".join([*self.reasons, *([f"and {more} more"] if more else [])])
