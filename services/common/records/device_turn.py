"""A turn on a device whose memory rollouts and training share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceTurn:
    """Command of the orchestrator to a replica or a trainer; a later one replaces the ones before.

    ``yours``: hold the device's memory and compute. Otherwise free it, and keep what is running for the next own turn.
    The receiver reports ``number`` when it has done so.
    """

    number: int
    yours: bool


NO_TURN = DeviceTurn(number=0, yours=False)
