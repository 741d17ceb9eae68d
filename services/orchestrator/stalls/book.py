"""The time accounts of all components as the orchestrator knows them, over the restarts of each.

A process that was started again begins its account anew; what its earlier lives had booked is kept and added. Pure.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import replace

from services.common.accounts import AccountState, Activity, ActivityTime, who_waits_for_whom

WINDOW_S = 30.0  # over which shares of the present are taken
MOST_COMPONENTS = 4096  # names are words of peers: those beyond are not kept


class AccountBook:
    def __init__(self) -> None:
        self._latest: dict[str, AccountState] = {}
        self._earlier: dict[str, dict[Activity, float]] = {}  # seconds of lives that are over
        self._marks: deque[tuple[float, dict[str, dict[Activity, float]]]] = deque()

    def note(self, accounts: Iterable[AccountState]) -> None:
        """Newer states of some components."""
        for account in accounts:
            known = self._latest.get(account.component)
            if known is None and len(self._latest) >= MOST_COMPONENTS:
                continue
            if known is not None and account.seconds < known.seconds:
                self._fold(known)
            self._latest[account.component] = account

    def totals(self) -> tuple[AccountState, ...]:
        """Every component with all that it ever booked, by name."""
        return tuple(self._total(self._latest[name]) for name in sorted(self._latest))

    def mark(self, now: float) -> None:
        """Remember where the accounts stand, for ``share_lately``."""
        self._marks.append((now, {account.component: _seconds(account) for account in self.totals()}))
        while len(self._marks) > 1 and self._marks[1][0] <= now - WINDOW_S:
            self._marks.popleft()

    def share_lately(self, components: Callable[[str], bool], activities: Callable[[Activity], bool]) -> float | None:
        """Of the time since the oldest mark, the share that these components spent in these activities."""
        if not self._marks:
            return None
        before = self._marks[0][1]
        spent = whole = 0.0
        for account in self.totals():
            if not components(account.component):
                continue
            for activity, seconds in _seconds(account).items():
                passed = seconds - before.get(account.component, {}).get(activity, 0.0)
                whole += passed
                spent += passed if activities(activity) else 0.0
        return spent / whole if whole > 0 else None

    def summary(self) -> dict[str, dict[str, float]]:
        """For ``summary.json``: component -> "activity" or "activity -> component waited for" -> share of its time."""
        return {
            account.component: {
                f"{activity.name} -> {activity.on}" if activity.on else activity.name: round(share, 4)
                for activity, share in sorted(account.shares().items(), key=lambda item: -item[1])
            }
            for account in self.totals()
        }

    def waits(self) -> dict[str, dict[str, float]]:
        """For ``summary.json``: component -> component waited for ("" is its own work) -> share of its time."""
        table: defaultdict[str, dict[str, float]] = defaultdict(dict)
        for (component, on), share in who_waits_for_whom(self.totals()).items():
            table[component][on] = round(share, 4)
        return dict(table)

    def _fold(self, ended: AccountState) -> None:
        earlier = self._earlier.setdefault(ended.component, {})
        for activity, seconds in _seconds(ended).items():
            earlier[activity] = earlier.get(activity, 0.0) + seconds

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


def _seconds(account: AccountState) -> dict[Activity, float]:
    return {Activity(a.name, a.on): a.seconds for a in account.activities}
