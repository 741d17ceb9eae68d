"""Adaptive timeouts: learns the normal time between changes of a counter in this run.

    counter grows -> learn the gap since the last change        counter is still, though due -> its age
    limit = max(10 s, 4 x the longest recent gap); one minute before the first few gaps

Gaps during a stall are not learnt. Learnt gaps decay by half in five minutes, so one slow moment does not blind the
detector for the rest of the run. Pure; the caller passes the time in.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

LEAST_S = 10.0
TIMES = 4.0
UNKNOWN_S = 60.0  # before the first gaps of the run
ENOUGH_GAPS = 3
HALF_LIFE_S = 300.0


@dataclass(slots=True)
class _Pulse:
    value: object
    since: float  # the last change, or the last moment at which no change was due
    longest_s: float = 0.0
    learnt_at: float = 0.0
    num_gaps: int = 0

    def learn(self, gap_s: float, now: float) -> None:
        self.longest_s = max(gap_s, self.longest_at(now))
        self.learnt_at = now
        self.num_gaps += 1

    def longest_at(self, now: float) -> float:
        return float(self.longest_s * 0.5 ** ((now - self.learnt_at) / HALF_LIFE_S))


class AdaptiveTimeouts:
    """Counters by key, with the gaps between their changes."""

    def __init__(self, least_s: float = LEAST_S, unknown_s: float = UNKNOWN_S) -> None:
        self.least_s = least_s
        self.unknown_s = unknown_s
        self.learning = True
        self.learning_durations = True  # of activities, which are told for a while after they ended
        self._pulses: dict[Hashable, _Pulse] = {}
        self._held: dict[Hashable, float] = {}

    def overdue(
        self,
        key: Hashable,
        value: object,
        now: float,
        *,
        due: bool = True,
        unknown_s: float | None = None,
        times: float = 1.0,
        most_s: float = float("inf"),
    ) -> float | None:
        """Observe a counter; returns the time of its last change when the gap exceeds the limit, else None.

        ``due`` says whether the counter should grow at all. ``unknown_s``: the limit before the first gaps. ``times``:
        factor on the limit. ``most_s``: upper bound of the limit.
        """
        pulse = self._pulses.get(key)
        if pulse is None:
            self._pulses[key] = _Pulse(value, now)
            return None
        if value != pulse.value:
            if self.learning:
                pulse.learn(now - pulse.since, now)
            pulse.value, pulse.since = value, now
            return None
        if not due:
            pulse.since = now
            return None
        limit = min(most_s, self._limit(pulse, now, unknown_s) * times)
        return pulse.since if now - pulse.since > limit else None

    def holds(self, key: Hashable, condition: bool, now: float, for_s: float) -> float | None:
        """Since when a condition holds, once it has for so long without a break."""
        if not condition:
            self._held.pop(key, None)
            return None
        since = self._held.setdefault(key, now)
        return since if now - since >= for_s else None

    def allow(self, key: Hashable, seconds: float, now: float) -> None:
        """Learn from a successful duration: allow twice that time."""
        pulse = self._pulses.get(key)
        if pulse is not None and self.learning_durations and seconds / 2 > pulse.longest_at(now):
            pulse.longest_s, pulse.learnt_at = seconds / 2, now

    def limit(self, key: Hashable, now: float, unknown_s: float | None = None) -> float:
        """How long this counter may stand, in seconds."""
        return self._limit(self._pulses.get(key), now, unknown_s)

    def skip(self, seconds: float) -> None:
        """Shift all gaps by the seconds during which the detector did not run."""
        for pulse in self._pulses.values():
            pulse.since += seconds
        for key in self._held:
            self._held[key] += seconds

    def _limit(self, pulse: _Pulse | None, now: float, unknown_s: float | None) -> float:
        if pulse is None or pulse.num_gaps < ENOUGH_GAPS:
            return (
                self.unknown_s
                if unknown_s is None
                else max(unknown_s, TIMES * (pulse.longest_at(now) if pulse else 0.0))
            )
        return max(self.least_s, TIMES * pulse.longest_at(now))
