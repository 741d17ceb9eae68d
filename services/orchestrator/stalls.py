"""The words for stalls: causes with their remedies, and what holds the run back; the time accounts of all components.

``stalls_rules`` finds the stalls.
"""

from __future__ import annotations

import enum
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from services.common.telemetry.accounts import (
    ORCHESTRATOR,
    AccountState,
    Activity,
    ActivityName,
    ActivityTime,
    Component,
    is_of_trainer,
    is_replica,
)
from services.common.telemetry.logs import LogEvent

COMPUTING = (ActivityName.TRAINING, ActivityName.REPLAYING)
_CODE_CHANGES = (
    "changed Python code is loaded by new processes only: interrupt the run, then `rollmill run --resume RUN`"
)


class Cause(enum.StrEnum):
    """A cause is one word, for logs, tests and docs, with the remedy."""

    advice: str

    def __new__(cls, word: str, advice: str) -> Cause:
        member = str.__new__(cls, word)
        member._value_, member.advice = word, advice
        return member

    SILENT = (
        "silent",
        "check that its process and machine run and reach the orchestrator (stopped or frozen process, cut or half-open "
        f"connection); for a blocked event loop, its log has the stack ({LogEvent.LOOP_BLOCKED})",
    )
    LOST = "lost", "start the component again; the work resumes without further action"
    ABSENT = "absent", "start the component, or find the reason in its log"
    STUCK = (
        "stuck",
        f"its log has the stack of the hanging thread ({LogEvent.THREAD_STUCK}); kill -9 the process: the supervisor "
        "starts a new one, and no acknowledged data is lost",
    )
    FROZEN = "frozen", "kill -9 the replica: the engine no longer computes, and only a new process helps"
    NO_FREE_DISK = (
        "no_free_disk",
        "free space on the disk of the run directory; the run continues without further action",
    )
    JOURNAL_STUCK = "journal_stuck", "check the file system of the run directory, such as a hanging network mount"
    STOOD_STILL = (
        "stood_still",
        "check the machine: the orchestrator's process was stopped or starved; leases were extended",
    )
    ORDER_LOST = (
        "order_lost",
        "the orchestrator sends the order again; if the stall stays, check the network in between",
    )
    NOT_ACKNOWLEDGED = (
        "not_acknowledged",
        "check the network between replica and orchestrator: records leave faster than they arrive",
    )
    WEIGHTS_NOT_ARRIVING = (
        "weights_not_arriving",
        f"check the network to the publisher, and {LogEvent.WEIGHTS_KEPT_OLD} in the replica's log",
    )
    UNREACHABLE = "unreachable", "start the component, or check the network in between; jobs are kept and sent again"
    NO_WORKERS = "no_workers", "start workers: python -m extras.farm"
    EXHAUSTED = "exhausted", "raise envgateway.sandbox.num_slots, or lower the limits of the programs that fill it"
    ALL_FILTERED = (
        "all_filtered",
        "all rewards of a group are equal, so the groups have no gradient: use easier or harder tasks, a finer "
        "reward, or batch.dynamic_sampling: false",
    )
    ALL_FAIL = (
        "all_fail",
        f"fix the cause in the failures, then run `rollmill resume` if the run was paused; {_CODE_CHANGES}",
    )
    MASKED = (
        "masked",
        f"fix the named causes, or raise rollout.max_masked_share, then run `rollmill resume`; {_CODE_CHANGES}",
    )
    NUMERICS = (
        "numerics",
        "repair the named cause and start another run, or raise policies.<name>.trainer.max_mismatch (docs/doctor.md)",
    )
    RECORDS_REFUSED = (
        "records_refused",
        "fix the named reason at that replica (model, tokenizer, settings, workflow or reward), or end its "
        "process (SIGTERM); its rollouts are lost meanwhile (docs/protocol.md has the bounds)",
    )
    NOTHING_TO_PLAY = "nothing_to_play", "data.curation refuses the whole dataset: loosen its limits, or add tasks"
    QUOTA_FULL = (
        "quota_full",
        "outstanding sequences fill the quota without a full batch: raise batch.max_staleness or lower batch.size",
    )
    NO_PROGRESS = "no_progress", "look at the log of the component, and at the function that is named"


class Hold(enum.StrEnum):
    """Names of the reasons that block all issues of task groups."""

    ENDED = "ended"
    PAUSED = "paused"
    DISK = "disk"
    GATEWAY = "envgateway"
    ALL_FAIL = "all fail"
    MASKED = "masked"
    NUMERICS = "numerics"


PAUSED_ITSELF = frozenset({Hold.ALL_FAIL, Hold.MASKED, Hold.NUMERICS})  # the run has paused itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """A stalled component. ``inferred`` from its time, or else seen directly."""

    component: Component
    cause: Cause
    detail: str
    since: float = -1.0  # monotonic; left out: since the detector has seen it
    for_s: float = 0.0  # that the detector must see it before it counts
    inferred: bool = False

    @property
    def key(self) -> tuple[Component, Cause]:
        return self.component, self.cause


# --- time accounts of all components ---------------------------------------------------------------------------------

WINDOW_S = 30.0  # over which shares of the present are taken
MOST_COMPONENTS = 4096  # names are words of peers: those beyond are not kept

_Seconds = dict[Activity, float]


class AccountBook:
    """Time accounts of all components, over the restarts of each: a restarted process begins its account anew, and the
    book adds the totals of its earlier incarnations."""

    def __init__(self) -> None:
        self._latest: dict[str, AccountState] = {}
        self._earlier: dict[str, _Seconds] = {}  # seconds of incarnations that are over
        # When, and the idle seconds and all seconds of trainers, and of replicas, until then.
        self._marks: deque[tuple[float, tuple[float, ...]]] = deque()

    def note(self, accounts: Iterable[AccountState]) -> None:
        """Note newer states of some components."""
        for account in accounts:
            known = self._latest.get(account.component)
            if known is None and len(self._latest) >= MOST_COMPONENTS:
                continue
            if known is not None and account.seconds < known.seconds:
                self._earlier[known.component] = self._seconds(known)
            self._latest[account.component] = account

    def _seconds(self, account: AccountState) -> _Seconds:
        """Seconds of this incarnation and the earlier ones."""
        found = dict(self._earlier.get(account.component, {}))
        for told in account.activities:
            activity = Activity(told.name, told.on)
            found[activity] = found.get(activity, 0.0) + told.seconds
        return found

    def totals(self) -> tuple[AccountState, ...]:
        """Every component with all its booked time, by name."""
        found = []
        for name, account in sorted(self._latest.items()):
            if name in self._earlier:
                now = {Activity(told.name, told.on): told for told in account.activities}
                activities = [
                    replace(now.get(activity) or ActivityTime(name=activity.name, on=activity.on), seconds=seconds)
                    for activity, seconds in self._seconds(account).items()
                ]
                account = replace(account, activities=tuple(activities))
            found.append(account)
        return tuple(found)

    def idle_shares(self, now: float) -> tuple[float | None, float | None]:
        """Shares of the time of trainers and of replicas in which they did not compute, and waited for the orchestrator,
        since the call ``WINDOW_S`` ago; None without any time."""
        sums = [0.0] * 4
        for name, account in self._latest.items():
            if is_of_trainer(name) or is_replica(name):
                first = 0 if is_of_trainer(name) else 2
                for activity, seconds in self._seconds(account).items():
                    idle = activity.name not in COMPUTING if is_of_trainer(name) else activity.on == ORCHESTRATOR
                    sums[first] += seconds if idle else 0.0
                    sums[first + 1] += seconds
        self._marks.append((now, tuple(sums)))
        while len(self._marks) > 1 and self._marks[1][0] <= now - WINDOW_S:
            self._marks.popleft()
        passed = [after - before for before, after in zip(self._marks[0][1], sums, strict=True)]
        trainers, replicas = (passed[at] / passed[at + 1] if passed[at + 1] > 0 else None for at in (0, 2))
        return trainers, replicas

    def summary(self) -> dict[str, dict[str, float]]:
        """For ``summary.json``: component -> "activity" or "activity -> awaited component" -> share of its time."""
        return {
            account.component: {name: round(share, 4) for name, share in account.named_shares().items()}
            for account in self.totals()
        }

    def waits(self) -> dict[str, dict[str, float]]:
        """For ``summary.json``: component -> awaited component ("" is its own work) -> share of its time."""
        table: dict[str, dict[str, float]] = {}
        for account in self.totals():
            row: defaultdict[str, float] = defaultdict(float)
            for activity, share in account.shares().items():
                row[activity.on] += share
            table[account.component] = {on: round(share, 4) for on, share in row.items()}
        return table
