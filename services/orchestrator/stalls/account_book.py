"""Time accounts of all components in the orchestrator, over the restarts of each.

A restarted process begins its account anew; the book keeps the totals of its earlier incarnations and adds them. Pure.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

from services.common.telemetry.accounts import AccountState, Activity, ActivityTime, wait_shares

_Seconds = dict[Activity, float]

WINDOW_S = 30.0  # over which shares of the present are taken
MOST_COMPONENTS = 4096  # names are words of peers: those beyond are not kept


class AccountBook:
    def __init__(self) -> None:
        self._latest: dict[str, AccountState] = {}
        self._earlier: dict[str, _Seconds] = {}  # seconds of lives that are over
        self._marks: deque[_Mark] = deque()

    def note(self, accounts: Iterable[AccountState]) -> None:
        """Note newer states of some components."""
        for account in accounts:
            known = self._latest.get(account.component)
            if account is known:
                continue  # most have not reported since the last look
            if known is None and len(self._latest) >= MOST_COMPONENTS:
                continue
            if known is not None and account.seconds < known.seconds:
                self._fold(known)
            self._latest[account.component] = account

    def totals(self) -> tuple[AccountState, ...]:
        """Every component with all its booked time, by name."""
        return tuple(self._total(self._latest[name]) for name in sorted(self._latest))

    def mark(self, now: float) -> None:
        """Remember the present accounts, for ``share_lately``."""
        self._marks.append(_Mark(now, dict(self._latest), dict(self._earlier)))
        while len(self._marks) > 1 and self._marks[1].at <= now - WINDOW_S:
            self._marks.popleft()

    def share_lately(self, components: Callable[[str], bool], activities: Callable[[Activity], bool]) -> float | None:
        """Share of these activities in the time of these components, since the oldest mark."""
        if not self._marks:
            return None
        before = self._marks[0]
        spent = whole = 0.0
        for name, account in self._latest.items():
            was = before.latest.get(name)
            if was is account or not components(name):
                continue
            booked = {} if was is None else _seconds(was, before.earlier.get(name))
            for activity, seconds in _seconds(account, self._earlier.get(name)).items():
                passed = seconds - booked.get(activity, 0.0)
                whole += passed
                spent += passed if activities(activity) else 0.0
        return spent / whole if whole > 0 else None

    def summary(self) -> dict[str, dict[str, float]]:
        """For ``summary.json``: component -> "activity" or "activity -> awaited component" -> share of its time."""
        return {
            account.component: {
                f"{activity.name} -> {activity.on}" if activity.on else activity.name: round(share, 4)
                for activity, share in sorted(account.shares().items(), key=lambda item: -item[1])
            }
            for account in self.totals()
        }

    def waits(self) -> dict[str, dict[str, float]]:
        """For ``summary.json``: component -> awaited component ("" is its own work) -> share of its time."""
        table: defaultdict[str, dict[str, float]] = defaultdict(dict)
        for (component, on), share in wait_shares(self.totals()).items():
            table[component][on] = round(share, 4)
        return dict(table)

    def _fold(self, ended: AccountState) -> None:
        self._earlier[ended.component] = _seconds(ended, self._earlier.get(ended.component))  # marks keep the old one

    def _total(self, account: AccountState) -> AccountState:
        earlier = self._earlier.get(account.component)
        if not earlier:
            return account
        known = {Activity(a.name, a.on) for a in account.activities}
        activities = [
            replace(a, seconds=a.seconds + earlier.get(Activity(a.name, a.on), 0.0)) for a in account.activities
        ]
        activities += [
            ActivityTime(name=activity.name, on=activity.on, seconds=seconds)
            for activity, seconds in earlier.items()
            if activity not in known
        ]
        return replace(account, activities=tuple(activities))


class _Mark(NamedTuple):
    """All accounts at one moment; states and earlier incarnations are immutable, so a mark costs two tables of
    references."""

    at: float
    latest: dict[str, AccountState]
    earlier: dict[str, _Seconds]


def _seconds(account: AccountState, earlier: _Seconds | None = None) -> _Seconds:
    """Seconds of this incarnation and the earlier ones."""
    found = dict(earlier or {})
    for told in account.activities:
        activity = Activity(told.name, told.on)
        found[activity] = found.get(activity, 0.0) + told.seconds
    return found
