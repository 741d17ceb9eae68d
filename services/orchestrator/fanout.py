"""Who fetches a weight version from whom, so that the publisher sends little more than one copy.

Replicas that hold the same base fetch the same payload. Some of them are relays: relay i fetches stripe i of the payload
from the publisher, and everybody gets the other stripes from the other relays. Who comes later, or failed at it, fetches
from replicas that hold the version by then, those first that were named least.

Knows addresses and what replicas hold; neither bytes nor connections.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from services.common.types import FetchPlan, WeightVersion

MAX_HOLDERS = 3  # named to a late receiver before the publisher


@dataclass(frozen=True, slots=True, kw_only=True)
class Receiver:
    """A replica that will want a version."""

    replica_id: str
    address: str  # of its WeightService; empty when nobody can reach it
    base: tuple[int, str]  # number and digest of what it holds


class FanOut:
    """The plans of the newest version of each policy, and how often each holder was named."""

    def __init__(self, max_relays: Mapping[str, int]) -> None:
        """``max_relays`` by policy; 0 lets everybody fetch from the publisher."""
        self._max_relays = max_relays
        self._plans: dict[str, dict[str, FetchPlan]] = {}
        self._named: Counter[str] = Counter()

    def published(self, policy: str, receivers: Iterable[Receiver]) -> None:
        """A new version exists: plan for everybody who is here. Plans of the version before are void."""
        groups: dict[tuple[int, str], list[Receiver]] = {}
        for receiver in receivers:
            groups.setdefault(receiver.base, []).append(receiver)
        self._plans[policy] = {}
        for members in groups.values():
            self._plans[policy] |= _plan(members, self._max_relays.get(policy, 0))

    def take_plan(self, policy: str, replica_id: str) -> FetchPlan | None:
        """The plan of a replica, once: whoever needs to be told again has missed it."""
        return self._plans.get(policy, {}).pop(replica_id, None)

    def sources(self, version: WeightVersion, own_address: str, holders: Iterable[str]) -> tuple[str, ...]:
        """Where a late receiver fetches: holders, those named least first, then the publisher."""
        if not self._max_relays.get(version.policy, 0):
            return version.sources
        others = sorted({h for h in holders if h and h != own_address}, key=lambda h: (self._named[h], h))
        chosen = others[:MAX_HOLDERS]
        if chosen:
            self._named[chosen[0]] += 1  # the others are asked only when it fails
        return (*chosen, *version.sources)


def _plan(members: list[Receiver], max_relays: int) -> dict[str, FetchPlan]:
    """Plans for replicas with one base. None alone: a stripe is worth something only when somebody else wants it."""
    relays = sorted({m.address for m in members if m.address})[:max_relays]
    if len(members) < 2 or not relays:
        return {}
    stripe_of = {address: stripe for stripe, address in enumerate(relays)}
    return {m.replica_id: FetchPlan(relays=tuple(relays), own_stripe=stripe_of.get(m.address)) for m in members}
