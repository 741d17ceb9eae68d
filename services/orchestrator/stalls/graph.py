"""Graph of the waits between components, from their accounts: the path from the run down to a cause. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping

from services.common.telemetry.accounts import AccountState
from services.common.telemetry.activities import ActivityName
from services.common.telemetry.components import (
    DISK,
    GATEWAY,
    GATEWAY_SANDBOX,
    GATEWAY_WORKERS,
    INFERENCE,
    NOBODY,
    ORCHESTRATOR,
    PERSON,
    REDIS,
    Component,
    is_engine,
    is_of_replica,
    is_records,
    is_trainer,
    is_weights,
    part,
    publisher,
    split,
)
from services.common.telemetry.components import trainer as trainer_component
from services.orchestrator.stalls.facts import Facts

ENDLESS = (INFERENCE, PERSON, NOBODY)  # waiting for these is not a link of a chain


class WaitGraph:
    """Components and the ones they wait for. The orchestrator waits for the replicas with its task groups, and for
    trainers with a full quota."""

    def __init__(self, facts: Facts) -> None:
        self._edges: dict[Component, dict[Component, str]] = {}  # component -> awaited component -> in words
        self._reported: set[tuple[Component, Component]] = set()  # edges that an account reports as a wait
        self._trees: dict[Component, dict[Component, Component]] = {}  # of ``chain``, by start
        for account in facts.accounts.values():
            self._add_account(account)
        parts = _parts(facts)
        for replica in facts.replicas:
            if replica.num_running:
                self._add(ORCHESTRATOR, replica.component, f"{replica.num_running} rollouts are played there")
            for name in parts.get(replica.component, ()):
                self._add(replica.component, name, "a part of the component")
        for component in facts.lost:
            if is_of_replica(component):
                self._add(ORCHESTRATOR, component, "the replica ran rollouts")
        for trainer in facts.trainers:
            name = trainer_component(trainer.policy)
            self._add(name, publisher(trainer.policy), "a part of the component")
            for rank in range(1, trainer.num_ranks):
                other = trainer_component(trainer.policy, rank)
                self._add(name, other, "ranks step together")
                self._add(other, name, "ranks step together")
        for policy in facts.policies:
            if policy.quota_full:
                self._add(
                    ORCHESTRATOR,
                    trainer_component(policy.policy),
                    "the staleness quota is full until the next training step",
                )
        for below in (REDIS, GATEWAY_WORKERS, GATEWAY_SANDBOX):
            self._add(GATEWAY, below, "programs run there")
        self._add(ORCHESTRATOR, DISK, "the journal")

    def leading_to(self, targets: Collection[Component]) -> set[Component]:
        """The components that wait for one of the targets, directly or not, and the targets themselves."""
        waiting: dict[Component, list[Component]] = {}
        for component, edges in self._edges.items():
            for on in edges:
                waiting.setdefault(on, []).append(component)
        found, there = set(targets), deque(targets)
        while there:
            for before in waiting.get(there.popleft(), ()):
                if before not in found:
                    found.add(before)
                    there.append(before)
        return found

    def chain(self, target: Component) -> tuple[str, ...]:
        """The path from a trainer, or else the orchestrator, to a component: one line per edge."""
        if not self._trees:
            starts = sorted(name for name in self._edges if is_trainer(name))
            self._trees = {start: self._tree(start) for start in [*starts, ORCHESTRATOR]}
        start = next((start for start, tree in self._trees.items() if target in tree), None)
        if start is None:
            return ()
        way: list[str] = []
        here = target
        while not way or here != start:
            before = self._trees[start][here]
            way.append(f"{before} waits for {here}: {self._edges[before][here]}")
            here = before
        return tuple(reversed(way))

    def end_of(self, start: Component) -> Component:
        """The last component along the longest waits from ``start``."""
        here, seen = start, {start}
        while (after := self._longest(here)) is not None and after not in seen:
            here = after
            seen.add(here)
        return here

    def _longest(self, component: Component) -> Component | None:
        edges = self._edges.get(component, {})
        return next((to for to in edges if to in self._edges or (component, to) in self._reported), None)

    def _tree(self, start: Component) -> dict[Component, Component]:
        """The shortest paths from one component, breadth first: the predecessor of each reachable component; for
        ``start`` itself in a cycle."""
        came_from: dict[Component, Component] = {}
        there = deque([start])
        while there:
            here = there.popleft()
            for after in self._edges.get(here, ()):
                if after not in came_from:
                    came_from[after] = here
                    there.append(after)
        return came_from

    def _add_account(self, account: AccountState) -> None:
        owner, _ = split(account.component)
        now = account.now()
        for activity in now:
            if len(now) > 1 and activity.name == ActivityName.WAITING_FOR_TASK_GROUPS:
                continue  # an idle slot has no information about the others
            on = part(owner, activity.on) if is_engine(activity.on) else activity.on
            if on not in ENDLESS:
                self._add(account.component, on, f"{activity.name} ({activity.longest_now_s:.0f} s)")
                self._reported.add((account.component, on))

    def _add(self, component: Component, on: Component, words: str) -> None:
        self._edges.setdefault(component, {}).setdefault(on, words)


def _parts(facts: Facts) -> dict[Component, list[Component]]:
    """Accounts of replicas' weights, then of their records, by the component of the replica."""
    found: dict[Component, list[Component]] = {}
    for is_part in (is_weights, is_records):
        for name in facts.accounts:
            if is_part(name):
                found.setdefault(split(name)[0], []).append(name)
    return found


def merged(accounts: Mapping[Component, AccountState], more: Collection[AccountState]) -> dict[Component, AccountState]:
    """Accounts by component; of one that is told twice, the one that has seen more counts."""
    found = dict(accounts)
    for account in more:
        known = found.get(account.component)
        if known is None or account.seconds >= known.seconds:
            found[account.component] = account
    return found
