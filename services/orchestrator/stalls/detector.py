"""Detects stalls once a second: component, cause and start of each, and its end.

    facts -> rules -> findings -> those that another one explains are dropped -> held for two looks -> stalls

Deterministic: time comes with the facts. Independent of the core and logs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from services.common.telemetry.accounts import LATELY_S, TimeAccount
from services.common.telemetry.components import CLOCK, ORCHESTRATOR, Component, is_engine, split
from services.orchestrator.stalls.account_book import AccountBook
from services.orchestrator.stalls.adaptive_timeouts import AdaptiveTimeouts
from services.orchestrator.stalls.facts import Cause, Facts, Finding
from services.orchestrator.stalls.graph import WaitGraph
from services.orchestrator.stalls.rules_peers import (
    absent_peers,
    lost_peers,
    queue_of_the_gateway,
    silent_dependencies,
    silent_peers,
)
from services.orchestrator.stalls.rules_run import (
    batch_refused,
    everything_refused,
    nothing_goes_on,
    nothing_is_learnt,
    nothing_to_play,
    rollouts_fail,
)
from services.orchestrator.stalls.rules_work import WORK_RULES

Rule = Callable[[Facts, AdaptiveTimeouts], Iterable[Finding]]

RULES: tuple[Rule, ...] = (
    silent_peers,
    lost_peers,
    absent_peers,
    silent_dependencies,
    queue_of_the_gateway,
    *WORK_RULES,
    nothing_is_learnt,
    batch_refused,
    rollouts_fail,
    everything_refused,
    nothing_to_play,
)
LOOKS = 2  # that a finding must last, and be gone
NOT_LOOKED_S = 5.0  # between two looks: the orchestrator itself stood still
JUMP_S = 5.0  # of the time of day against the monotonic clock
TOLD_S = 10.0  # a thing of a moment is shown for so long


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """A reported stall with its cause."""

    component: Component
    cause: Cause
    detail: str
    advice: str
    since: float  # monotonic
    chain: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[Component, Cause]:
        return self.component, self.cause


@dataclass(frozen=True, slots=True)
class Change:
    """A begun or ended stall, found by one look."""

    begun: tuple[Stall, ...] = ()
    ended: tuple[Stall, ...] = ()


@dataclass(slots=True)
class _Seen:
    stall: Stall
    num_looks: int = 1
    num_missed: int = 0
    told: bool = False


class StallDetector:
    def __init__(self, timeouts: AdaptiveTimeouts | None = None) -> None:
        self.timeouts = timeouts or AdaptiveTimeouts()
        self._seen: dict[tuple[Component, Cause], _Seen] = {}
        self._moments: list[tuple[float, Finding]] = []  # with the end of its report
        self._stalled_at = float("-inf")
        self._looked_at: tuple[float, float] | None = None  # monotonic, wall

    @property
    def stalls(self) -> tuple[Stall, ...]:
        """The present stalls, oldest first."""
        return tuple(sorted((s.stall for s in self._seen.values() if s.told), key=lambda stall: stall.since))

    def look(self, facts: Facts) -> Change:
        """Look once; the caller does so about once a second."""
        self._look_at_clocks(facts)
        if self._seen:
            self._stalled_at = facts.now
        self.timeouts.learning = not self._seen
        self.timeouts.learning_durations = facts.now - self._stalled_at > 2 * LATELY_S
        findings = [finding for rule in RULES for finding in rule(facts, self.timeouts)]
        last_resort = nothing_goes_on(facts, self.timeouts)  # always called: the rule learns the normal times
        if last_resort is not None and not findings:
            findings.append(last_resort)
        findings += [finding for until, finding in self._moments if facts.now < until]
        if facts.ended or facts.paused:
            findings = []
        if not findings:
            return self._settle([])
        graph = WaitGraph(facts)
        return self._settle([_stall(finding, graph) for finding in _roots(findings, graph)])

    def _look_at_clocks(self, facts: Facts) -> None:
        before, self._looked_at = self._looked_at, (facts.now, facts.wall)
        if before is None:
            return
        gap, jump = facts.now - before[0], (facts.wall - before[1]) - (facts.now - before[0])
        if gap > NOT_LOOKED_S:
            self.timeouts.skip(gap)
            detail = f"its process or event loop stood still for {gap:.0f} s"
            self._moment(
                facts, Finding(component=ORCHESTRATOR, cause=Cause.STOOD_STILL, detail=detail, since=before[0])
            )
        elif abs(jump) > JUMP_S:
            detail = f"the time of day jumped by {jump:+.0f} s"
            self._moment(facts, Finding(component=CLOCK, cause=Cause.CLOCK_JUMPED, detail=detail, since=facts.now))

    def _moment(self, facts: Facts, finding: Finding) -> None:
        self._moments = [(until, kept) for until, kept in self._moments if facts.now < until]
        self._moments.append((facts.now + TOLD_S, finding))

    def _settle(self, found: list[Stall]) -> Change:
        begun, ended = [], []
        keys = {stall.key for stall in found}
        for stall in found:
            seen = self._seen.get(stall.key)
            if seen is None:
                self._seen[stall.key] = _Seen(stall)
                continue
            seen.stall, seen.num_missed = stall, 0
            seen.num_looks += 1
            if seen.num_looks >= LOOKS and not seen.told:
                seen.told = True
                begun.append(stall)
        for key, seen in list(self._seen.items()):
            if key in keys:
                continue
            seen.num_missed += 1
            if seen.num_missed >= LOOKS or not seen.told:
                del self._seen[key]
                if seen.told:
                    ended.append(seen.stall)
        return Change(tuple(begun), tuple(ended))


def _roots(findings: list[Finding], graph: WaitGraph) -> list[Finding]:
    """Drop findings that another finding explains: an inferred one whose component waits for one that was seen
    directly, and all but the first about the same component and cause."""
    direct = {finding.component for finding in findings if not finding.inferred}
    explaining = graph.leading_to(direct)
    kept: dict[tuple[Component, Cause], Finding] = {}
    for finding in findings:
        explained = finding.inferred and finding.component in explaining
        owner, inner = split(finding.component)
        of_direct = is_engine(inner) and owner in direct
        if not explained and not of_direct:
            kept.setdefault(finding.key, finding)
    return list(kept.values())


def _stall(finding: Finding, graph: WaitGraph) -> Stall:
    return Stall(
        component=finding.component,
        cause=finding.cause,
        detail=finding.detail,
        advice=finding.advice,
        since=finding.since,
        chain=graph.chain(finding.component),
    )


class StallState:
    """State for stall detection: all time accounts, lost components and present stalls."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.account = TimeAccount(ORCHESTRATOR, clock=clock)
        self.book = AccountBook()
        self.stalls: tuple[Stall, ...] = ()  # causes that block the run
        self.lost: dict[
            Component, float
        ] = {}  # components with a lost lease until they return, and the time of the loss
