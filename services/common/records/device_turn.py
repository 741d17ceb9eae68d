"""A turn on a device whose memory rollouts and training share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceTurn:
    """Command of the orchestrator to a replica or a trainer; a later command replaces earlier ones.

    ``yours``: hold the device's memory and compute. Otherwise free the memory, and keep running work for the next own turn.
    The receiver reports ``number`` after that.
    """

    number: int
    yours: bool


NO_TURN = DeviceTurn(number=0, yours=False)
