"""Free slots, by purpose."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .slots import Slot

PROGRAM, LIVE = "program", "live"  # LIVE: processes that stay between calls


class Places:
    """Free slots by place. The caller of ``take`` has checked that a slot is free: the gateway counts them, too."""

    def __init__(self, slots: Mapping[str, Iterable[Slot]]) -> None:
        self._free = {place: list(owned) for place, owned in slots.items()}
        self._place = {slot.index: place for place, owned in self._free.items() for slot in owned}
        self.slots = sorted((slot for owned in self._free.values() for slot in owned), key=lambda slot: slot.index)

    def num(self, place: str) -> int:
        """Slots of this kind, free or not."""
        return sum(owned == place for owned in self._place.values())

    def take(self, place: str) -> Slot:
        return self._free[place].pop()

    def give_back(self, slot: Slot) -> None:
        """Return a slot that has no process and an empty work dir."""
        self._free[self._place[slot.index]].append(slot)
