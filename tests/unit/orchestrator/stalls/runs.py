"""A synthetic run for the detector: a clock, a healthy state, and the changes of a test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from services.common.telemetry.accounts import AccountState, ActivityName, ActivityTime, PeerState
from services.orchestrator.stalls import Facts, PolicyFacts, ReplicaFacts, Stall, StallDetector


def activity(name: str, on: str = "", now: int = 1, age: float = 1.0, done: int = 0, **more: Any) -> ActivityTime:
    return ActivityTime(
        name=name, on=on, num_now=now, longest_now_s=age if now else 0.0, num_done=done, seconds=1.0, **more
    )


def account(component: str, *activities: ActivityTime, progress: int = 0, cpu_s: float = 0.0) -> AccountState:
    return AccountState(component=component, activities=activities, progress=progress, cpu_s=cpu_s)


class MadeUpRun:
    """``tick`` is one look, a second later. Without a change every counter grows and no component stalls."""

    def __init__(self) -> None:
        self.detector = StallDetector()
        self.now = 1000.0
        self.ticks = 0
        self.edits: list[Callable[[Facts], Facts]] = []
        self.frozen: dict[str, int] = {}  # counters that no longer grow, at which value

    def count(self, name: str, per_tick: int = 1) -> int:
        return self.frozen.get(name, self.ticks * per_tick)

    def freeze(self, *names: str) -> None:
        self.frozen |= {name: self.count(name) for name in names}

    def thaw(self) -> None:
        self.frozen.clear()
        self.edits.clear()

    def facts(self) -> Facts:
        reward = activity("waiting for reward", "envgateway", done=self.count("reward"))
        slots = account(
            "replica/a",
            activity("generating", "engine/model0", now=4, done=self.count("generations")),
            reward,
            progress=self.count("tokens", 100),
        )
        trainer = account(
            "trainer/model0", activity("training", done=self.count("states")), progress=self.count("micro-batches")
        )
        found = Facts(
            now=self.now,
            replicas=(
                ReplicaFacts(
                    component="replica/a",
                    num_reports=self.count("replica reports"),
                ),
            ),
            policies=(
                PolicyFacts(
                    policy="model0",
                    batch_size=8,
                    num_kept=self.count("kept"),
                    rank_reports={0: self.count("trainer reports")},
                ),
            ),
            accounts={
                a.component: a
                for a in (
                    slots,
                    account("replica/a/records", activity(ActivityName.NOTHING_TO_SEND), progress=self.count("acks")),
                    account("replica/a/weights/model0", activity(ActivityName.UP_TO_DATE)),
                    trainer,
                )
            },
            peers={
                "envgateway": PeerState(component="envgateway"),
                "publisher/model0": PeerState(component="publisher/model0"),
            },
            progress={"records": float(self.count("records"))},
        )
        for edit in self.edits:
            found = edit(found)
        return found

    def set(self, **changes: Any) -> None:
        self.edits.append(lambda facts: replace(facts, **changes))

    def set_replica(self, **changes: Any) -> None:
        self.edits.append(lambda facts: replace(facts, replicas=(replace(facts.replicas[0], **changes),)))

    def set_policy(self, **changes: Any) -> None:
        self.edits.append(lambda facts: replace(facts, policies=(replace(facts.policies[0], **changes),)))

    def set_account(self, make: Callable[[], AccountState]) -> None:
        self.edits.append(lambda facts: replace(facts, accounts={**facts.accounts, make().component: make()}))

    def set_peer(self, component: str, **changes: Any) -> None:
        self.edits.append(
            lambda facts: replace(
                facts, peers={**facts.peers, component: replace(PeerState(component=component), **changes)}
            )
        )

    def tick(self, seconds: float = 1.0) -> None:
        self.now += seconds
        self.ticks += 1
        self.detector.look(self.facts())

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.tick()

    def named_within(self, seconds: int = 30) -> set[tuple[str, str]]:
        """The pairs that are told, as soon as there are any."""
        for _ in range(seconds):
            self.tick()
            if self.stalls:
                return self.pairs
        return set()

    @property
    def stalls(self) -> tuple[Stall, ...]:
        return self.detector.stalls

    @property
    def pairs(self) -> set[tuple[str, str]]:
        return {(stall.component, stall.cause.value) for stall in self.stalls}
