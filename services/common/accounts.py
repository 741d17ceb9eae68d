"""Where the time of a component goes, and whom it waits for.

A ``TimeAccount`` has lanes (a trainer has one, a replica one per slot), and at each moment each lane is in exactly one
activity: entering one leaves the other. So the seconds of all activities sum to lanes x lifetime by construction, however
tasks and threads interleave. What is entered inside something else counts alone (the innermost); that goes on afterwards.

    with account.lane("playing"):                             # one of the free lanes, for this task and what it starts
        with account.during("generating", on="engine/model0"):
            ...

Knows nothing about gRPC, services, or who reads the figures. Every method may be called from any thread.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NamedTuple

LATELY_S = 30.0  # ends of activities that ``longest_done_s`` looks at: between once and twice as long ago


class Activity(NamedTuple):
    """What a lane is in; ``on`` is the component that it waits for, if any."""

    name: str
    on: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivityTime:
    """One activity of an account, now."""

    name: str
    on: str = ""
    seconds: float = 0.0  # lane-seconds since the start
    num_now: int = 0  # lanes in it
    longest_now_s: float = 0.0  # of those that are in it
    num_done: int = 0  # ends since the start
    longest_done_s: float = 0.0  # of those that ended lately
    detail: str = ""  # of the one that is in it longest


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountState:
    """An account at one moment."""

    component: str
    num_lanes: int = 1
    activities: tuple[ActivityTime, ...] = ()
    progress: int = 0
    cpu_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Lanes x lifetime."""
        return sum(activity.seconds for activity in self.activities)

    def shares(self) -> dict[Activity, float]:
        """Of the lanes' time since the start; they sum to 1 unless no time has passed."""
        whole = self.seconds
        return {Activity(a.name, a.on): a.seconds / whole for a in self.activities} if whole > 0 else {}

    def now(self) -> list[ActivityTime]:
        """What is being done, longest first."""
        return sorted((a for a in self.activities if a.num_now), key=lambda a: -a.longest_now_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerState:
    """What a component knows of another one that it depends on."""

    component: str
    address: str = ""
    silent_s: float = 0.0  # since it last answered; 0 when it answered the last time
    detail: str = ""  # why it did not answer
    gauges: Mapping[str, float] = field(default_factory=dict)  # when it last answered
    accounts: tuple[AccountState, ...] = ()


@dataclass(slots=True, eq=False)
class _Entry:
    activity: Activity
    opened: float = 0.0
    detail: str = ""


class Wait:
    """An activity that is going on; what becomes known about it may be noted."""

    __slots__ = ("_entry",)

    def __init__(self, entry: _Entry) -> None:
        self._entry = entry

    def note(self, detail: str) -> None:
        self._entry.detail = detail


@dataclass(slots=True, eq=False)
class Lane:
    """One of the things that a component does at once. The last entry is the one that counts."""

    account: TimeAccount
    entries: list[_Entry]
    since: float  # when the entry that counts began to, or began to again


@dataclass(slots=True)
class _Total:
    seconds: float = 0.0
    num_done: int = 0
    longest: list[float] = field(default_factory=lambda: [0.0, 0.0])  # of this window and of the one before


_LANE: ContextVar[Lane | None] = ContextVar("lane", default=None)


class TimeAccount:
    def __init__(
        self,
        component: str,
        *,
        num_lanes: int = 1,
        rest: Activity = Activity("idle"),
        clock: Callable[[], float] = time.monotonic,
        cpu_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """``rest`` is what lanes are in that nothing occupies; ``cpu_s`` are the processor seconds of the work."""
        self.component = component
        self.num_lanes = num_lanes
        self._clock = clock
        self._cpu_s = cpu_s
        self._lock = threading.Lock()
        self._rest = rest
        now = clock()
        self._lanes = [Lane(self, [_Entry(rest, now)], now) for _ in range(num_lanes)]
        self._free = list(reversed(self._lanes)) if num_lanes > 1 else []
        self._totals: defaultdict[Activity, _Total] = defaultdict(_Total)
        self._window_since = now
        self._progress = 0

    # -- what a lane does --------------------------------------------------------------------------------------------

    @contextmanager
    def lane(self, name: str, on: str = "") -> Iterator[Lane | None]:
        """Occupy a free lane for this task; None, and nothing is counted, when there is none."""
        with self._lock:
            lane = self._free.pop() if self._free else None
            if lane is not None:
                self._open(lane, _Entry(Activity(name, on)))
        token = _LANE.set(lane)
        try:
            yield lane
        finally:
            _LANE.reset(token)
            if lane is not None:
                with self._lock:
                    now = self._clock()
                    while len(lane.entries) > 1:
                        self._close(lane, lane.entries[-1], now)
                    self._replace(lane, Activity(*self._rest), now)
                    self._free.append(lane)

    @contextmanager
    def during(self, name: str, on: str = "", lane: Lane | None = None) -> Iterator[Wait]:
        """The lane of this task, or the one that is given, is in this. A task without a lane counts only where the
        account has but one."""
        entry = _Entry(Activity(name, on))
        own = lane or self.here()
        if own is not None:
            with self._lock:
                self._open(own, entry)
        try:
            yield Wait(entry)
        finally:
            if own is not None:
                with self._lock:
                    self._close(own, entry, self._clock())

    def here(self) -> Lane | None:
        """The lane of this task."""
        lane = _LANE.get()
        if lane is not None and lane.account is self:
            return lane
        return self._lanes[0] if self.num_lanes == 1 else None

    def enter(self, name: str, on: str = "", detail: str = "") -> None:
        """What the only lane is in from now on, beneath what is entered with ``during``. The same again changes nothing
        but the detail."""
        with self._lock:
            lane = self._lanes[0]
            self._replace(lane, Activity(name, on), self._clock())
            lane.entries[0].detail = detail

    def rest(self, name: str, on: str = "") -> None:
        """What free lanes are in from now on."""
        with self._lock:
            self._rest = Activity(name, on)
            now = self._clock()
            for lane in self._free:
                self._replace(lane, self._rest, now)

    def beat(self, num_done: int = 1) -> None:
        """Pieces of work were done."""
        self._progress += num_done  # by one thread; a lock would be felt in a decoding step

    def set_progress(self, progress: int) -> None:
        """The pieces of work since the start, where somebody counts them already."""
        self._progress = progress

    # -- what is told ------------------------------------------------------------------------------------------------

    def state(self) -> AccountState:
        """The account now."""
        with self._lock:
            now = self._clock()
            self._roll(now)
            current: defaultdict[Activity, list[tuple[float, str]]] = defaultdict(list)
            for lane in self._lanes:
                entry = lane.entries[-1]
                current[entry.activity].append((now - lane.since, entry.detail))
            known = {**dict.fromkeys(self._totals), **dict.fromkeys(current)}
            return AccountState(
                component=self.component,
                num_lanes=self.num_lanes,
                activities=tuple(self._told(activity, current.get(activity, [])) for activity in known),
                progress=self._progress,
                cpu_s=self._cpu_s(),
            )

    def _told(self, activity: Activity, current: list[tuple[float, str]]) -> ActivityTime:
        total = self._totals.get(activity) or _Total()
        longest_s, detail = max(current, default=(0.0, ""))
        return ActivityTime(
            name=activity.name,
            on=activity.on,
            seconds=total.seconds + sum(seconds for seconds, _ in current),
            num_now=len(current),
            longest_now_s=longest_s,
            num_done=total.num_done,
            longest_done_s=max(total.longest),
            detail=detail,
        )

    # -- bookkeeping, under the lock ---------------------------------------------------------------------------------

    def _open(self, lane: Lane, entry: _Entry) -> None:
        entry.opened = self._clock()
        self._settle(lane, entry.opened)
        lane.entries.append(entry)

    def _close(self, lane: Lane, entry: _Entry, now: float) -> None:
        if entry not in lane.entries:
            return  # the lane was given back before: whoever entered this was left behind
        if lane.entries[-1] is entry:
            self._settle(lane, now)
        lane.entries.remove(entry)
        self._ended(entry, now)

    def _replace(self, lane: Lane, activity: Activity, now: float) -> None:
        """The lowest entry becomes another one."""
        lowest = lane.entries[0]
        if lowest.activity == activity:
            return
        if len(lane.entries) == 1:
            self._settle(lane, now)
        self._ended(lowest, now)
        lane.entries[0] = _Entry(activity, now)

    def _settle(self, lane: Lane, now: float) -> None:
        """Book the time since the last change on what counted."""
        self._totals[lane.entries[-1].activity].seconds += now - lane.since
        lane.since = now

    def _ended(self, entry: _Entry, now: float) -> None:
        self._roll(now)
        total = self._totals[entry.activity]
        total.num_done += 1
        total.longest[0] = max(total.longest[0], now - entry.opened)

    def _roll(self, now: float) -> None:
        if now - self._window_since < LATELY_S:
            return
        self._window_since = now
        for total in self._totals.values():
            total.longest = [0.0, total.longest[0]]


@contextmanager
def during_here(name: str, on: str = "") -> Iterator[None]:
    """The same as ``during`` of the account whose lane this task occupies; nothing is counted without one."""
    lane = _LANE.get()
    if lane is None:
        yield
        return
    with lane.account.during(name, on, lane):
        yield


Matrix = dict[tuple[str, str], float]


def who_waits_for_whom(accounts: Iterable[AccountState]) -> Matrix:
    """(component, component waited for) -> share of the first one's time; "" stands for its own work.

    >>> waits = ActivityTime(name="waiting for a batch", on="orchestrator", seconds=3.0)
    >>> who_waits_for_whom([AccountState(component="t", activities=(waits, ActivityTime(name="training", seconds=1.0)))])
    {('t', 'orchestrator'): 0.75, ('t', ''): 0.25}
    """
    matrix: defaultdict[tuple[str, str], float] = defaultdict(float)
    for account in accounts:
        for activity, share in account.shares().items():
            matrix[account.component, activity.on] += share
    return dict(matrix)
