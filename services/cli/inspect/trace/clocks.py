"""Replicas on other machines have clocks of their own: move their times so that cause comes before effect.

A replica cannot accept an order before its record in the journal, nor send a record after that was durable. Where its
times say so they are moved, by the least that fits; where they fit they are left alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from services.cli.inspect.trace.facts import Assignment, GroupFacts, SlotFacts

_TIMES = ("accepted_at", "started_at", "finished_at", "sent_at")


def fitted(facts: GroupFacts) -> GroupFacts:
    """The same facts with the times of every replica moved to the orchestrator's clock, as far as they allow it."""
    slots: dict[str, list[SlotFacts]] = defaultdict(list)
    for slot in facts.slots:
        slots[slot.replica_id].append(slot)
    shifts = {replica: _shift(replica, found, facts.assignments) for replica, found in slots.items()}
    moved = tuple(_moved(slot, shifts[slot.replica_id]) for slot in facts.slots)
    return replace(facts, slots=moved, clocks={replica: shift for replica, shift in shifts.items() if shift})


def _shift(replica_id: str, slots: Iterable[SlotFacts], assignments: Iterable[Assignment]) -> float:
    """Seconds to add to a replica's times; 0 when they fit, or when no shift fits."""
    issued = min((a.at for a in assignments if a.replica_id == replica_id and a.at), default=0.0)
    least, most = float("-inf"), float("inf")
    for slot in slots:
        first = next((at for at in (slot.accepted_at, slot.started_at) if at), 0.0)
        last = next((at for at in (slot.sent_at, slot.finished_at) if at), 0.0)
        if first and issued:
            least = max(least, issued - first)
        if last and slot.durable_at:
            most = min(most, slot.durable_at - last)
    if least > most:
        return 0.0
    return min(max(0.0, least), most)


def _moved(slot: SlotFacts, shift: float) -> SlotFacts:
    if not shift:
        return slot
    return replace(slot, **{name: at + shift for name in _TIMES if (at := getattr(slot, name))})
