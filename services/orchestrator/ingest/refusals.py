"""Refused records, by reason and by sender: counted, logged at intervals, and reported as a stall.

Peers choose the names of senders, so at most ``MOST_SENDERS`` are kept. Independent of grpc.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import structlog

from services.common.records.refusals import Refusal, RefusalReason, counter_of
from services.common.telemetry.repeats import Repeats

log = structlog.get_logger()

MOST_SENDERS = 1024
MOST_SHOWN = 64  # characters of a peer's word in the log
OTHERS = "others"


@dataclass(slots=True)
class Streak:
    """Refusals of one sender since its last accepted record."""

    number: int
    since: float  # on the caller's clock
    newest: float
    last: Refusal


class Refusals:
    def __init__(self, counters: Counter[str], clock: Callable[[], float] = time.monotonic) -> None:
        """``counters`` are the run's, which outlive the process."""
        self._counters = counters
        self._clock = clock
        self._repeats = Repeats(clock)
        self._streaks: dict[str, Streak] = {}  # by replica id

    @property
    def streaks(self) -> Mapping[str, Streak]:
        """Streaks by replica id."""
        return self._streaks

    def refused(self, replica_id: str, task_group_id: str, index: int, refusal: Refusal) -> None:
        """Count a refused record."""
        self._counters[counter_of(refusal.reason)] += 1
        now = self._clock()
        sender = replica_id[:MOST_SHOWN]
        if sender not in self._streaks and len(self._streaks) >= MOST_SENDERS:
            sender = OTHERS
        streak = self._streaks.setdefault(sender, Streak(0, now, now, refusal))
        streak.number += 1
        streak.newest, streak.last = now, refusal
        if (untold := self._repeats.tell(refusal.reason.value)) is not None:
            log.warning(
                "record.refused",
                reason=refusal.reason.value,
                detail=refusal.detail,
                replica=sender,
                task_group=task_group_id[:MOST_SHOWN],
                index=index,
                **untold,
            )

    def taken(self, replica_id: str) -> None:
        """End the streak of a sender after a good record."""
        self._streaks.pop(replica_id[:MOST_SHOWN], None)

    def by_reason(self) -> dict[str, int]:
        """Counts of the whole run, largest first."""
        found = {reason.value: self._counters[counter_of(reason)] for reason in RefusalReason}
        return dict(sorted(((k, n) for k, n in found.items() if n), key=lambda item: -item[1]))
