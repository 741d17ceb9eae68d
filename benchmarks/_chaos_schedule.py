"""The seeded schedule of ``chaos.py``: which fault comes next, at which process, and for how long. Pure.

Kinds are dealt like cards: every kind comes once before any comes again, so that a short run has as many kinds as it
has faults, and a long one has them evenly.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass


class Kind(enum.StrEnum):
    """The kinds of faults."""

    KILL_TRAINER = "kill trainer"
    KILL_ORCHESTRATOR = "kill orchestrator"
    KILL_REPLICA = "kill replica"
    KILL_GATEWAY = "kill gateway"
    KILL_PUBLISHER = "kill publisher"
    STOP_REPLICA = "stop replica past its lease"
    STOP_TRAINER = "stop trainer past its lease"
    STOP_ORCHESTRATOR = "stop orchestrator past all leases"
    CUT_CONNECTIONS = "cut connections"
    HALF_OPEN = "half-open connections"
    LOSE_ORDERS = "lose the orchestrator's messages"
    FULL_DISK = "full disk"
    CLOCK_FORWARD = "clock jumps forward"
    CLOCK_BACK = "clock jumps back"
    CHURN = "replicas come and go"
    FLIP_SEGMENT = "flip a byte of the journal"
    FLIP_CHECKPOINT = "flip a byte of a checkpoint"
    FLIP_WEIGHTS = "flip a byte of weights in shared memory"


# In which something is measured come first in every deal: short runs need them.
MEASURED = (Kind.KILL_TRAINER, Kind.KILL_ORCHESTRATOR, Kind.KILL_REPLICA)


@dataclass(frozen=True, slots=True)
class Fault:
    """One entry of the schedule. ``draw`` in [0, 1) chooses among the present replicas, bytes or records."""

    kind: Kind
    draw: float
    pause_s: float  # between the recovery from it and the next


def schedule(
    seed: int, kinds: Collection[Kind] = tuple(Kind), pauses_s: tuple[float, float] = (0.5, 2.0)
) -> Iterator[Fault]:
    """Faults without end; the same for the same seed and kinds."""
    rng = random.Random(seed)
    ordered = [kind for kind in Kind if kind in kinds]
    while True:
        first = [kind for kind in ordered if kind in MEASURED]
        rest = [kind for kind in ordered if kind not in MEASURED]
        rng.shuffle(first)
        rng.shuffle(rest)
        for kind in (*first, *rest):
            yield Fault(kind, rng.random(), rng.uniform(*pauses_s))
