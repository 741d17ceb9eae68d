"""Who waits for whom now, from the components' accounts: the way from the run down to a cause. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping

from services.common.accounts import AccountState
from services.orchestrator.stalls.facts import GATEWAY, ORCHESTRATOR, Facts

IDLE_SLOT = "waiting for task groups"
ENDLESS = ("inference", "person", "")  # waiting for these is not a link of a chain


class WaitGraph:
    """Components and the ones they wait for. The orchestrator waits for the replicas that play for it, and for trainers
    whose quota is full."""

    def __init__(self, facts: Facts) -> None:
        self._edges: dict[str, dict[str, str]] = {}  # component -> component waited for -> in which words
        for account in facts.accounts.values():
            self._add_account(account)
        for replica in facts.replicas:
            if replica.num_running:
                self._add(ORCHESTRATOR, replica.component, f"{replica.num_running} rollouts are played there")
            for part in ("weights", "records"):
                for name in facts.accounts:
                    if name.startswith(f"{replica.component}/{part}"):
                        self._add(replica.component, name, "a part of it")
        for component in facts.lost:
            if component.startswith("replica/"):
                self._add(ORCHESTRATOR, component, "it played rollouts")
        for trainer in facts.trainers:
            name = f"trainer/{trainer.policy}"
            self._add(name, f"publisher/{trainer.policy}", "a part of it")
            for rank in range(1, trainer.num_ranks):
                self._add(name, f"{name}/rank{rank}", "ranks step together")
                self._add(f"{name}/rank{rank}", name, "ranks step together")
        for policy in facts.policies:
            if policy.quota_full:
                self._add(ORCHESTRATOR, f"trainer/{policy.policy}", "the staleness quota is full until it has trained")
        for below in ("redis", f"{GATEWAY}/workers", f"{GATEWAY}/sandbox"):
            self._add(GATEWAY, below, "programs run there")
        self._add(ORCHESTRATOR, "disk", "the journal")

    def leads_to(self, start: str, targets: Collection[str]) -> bool:
        """Whether somebody else among the targets is waited for, directly or not."""
        return bool(self._way(start, set(targets) - {start}))

    def chain(self, target: str) -> tuple[str, ...]:
        """From a trainer, or else the orchestrator, to a component: one line per link."""
        starts = sorted(name for name in self._edges if name.startswith("trainer/") and "/rank" not in name)
        ways = [way for start in [*starts, ORCHESTRATOR] if (way := self._way(start, {target}))]
        way = next(iter(ways), [])
        return tuple(f"{a} waits for {b}: {self._edges[a][b]}" for a, b in itertools.pairwise(way))

    def end_of(self, start: str) -> str:
        """Where the longest waits lead, from one component on."""
        here, seen = start, {start}
        while (after := self._longest(here)) is not None and after not in seen:
            here = after
            seen.add(here)
        return here

    def _longest(self, component: str) -> str | None:
        edges = {to: words for to, words in self._edges.get(component, {}).items() if to in self._edges or "(" in words}
        return next(iter(edges), None)

    def _way(self, start: str, targets: set[str]) -> list[str]:
        """The shortest way, breadth first."""
        ways, seen = [[start]], {start}
        while ways:
            way = ways.pop(0)
            for after in self._edges.get(way[-1], ()):
                if after in targets:
                    return [*way, after]
                if after not in seen:
                    seen.add(after)
                    ways.append([*way, after])
        return []

    def _add_account(self, account: AccountState) -> None:
        owner, _, _ = account.component.partition("/weights/")
        now = account.now()
        for activity in now:
            if len(now) > 1 and activity.name == IDLE_SLOT:
                continue  # a slot without work says nothing about the others
            on = f"{owner}/{activity.on}" if activity.on.startswith("engine/") else activity.on
            if on not in ENDLESS:
                self._add(account.component, on, f"{activity.name} ({activity.longest_now_s:.0f} s)")

    def _add(self, component: str, on: str, words: str) -> None:
        self._edges.setdefault(component, {}).setdefault(on, words)


def merged(accounts: Mapping[str, AccountState], more: Collection[AccountState]) -> dict[str, AccountState]:
    """Accounts by component; of one that is told twice, the one that has seen more counts."""
    found = dict(accounts)
    for account in more:
        known = found.get(account.component)
        if known is None or account.seconds >= known.seconds:
            found[account.component] = account
    return found
