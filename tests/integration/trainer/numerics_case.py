"""Two sharded ranks refuse a batch of an engine with a fault: ``python -m tests.integration.trainer.numerics_case MODEL OUT``.

Each rank writes the message, or nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

from services.common.system.child import run_and_leave
from services.trainer.numerics import MismatchError
from services.trainer.ranks import init_ranks, leave_ranks
from tests.unit.trainer.test_numerics import World


def main() -> int:
    model, out = map(Path, sys.argv[1:])
    ranks = init_ranks(timeout_s=120.0, device="cpu")
    told = {}
    for fault in ("none", "stale", "temperature"):
        world = World(model, ranks=ranks)
        world.engine.temperature = 1.1 if fault == "temperature" else 1.0
        try:
            for number in (1, 2, 3) if fault != "none" else (1,):
                world.train(number)
        except MismatchError as error:
            told[fault] = error.message
    (out / f"rank{ranks.rank}").write_text("\n".join(f"{name}: {text}" for name, text in told.items()))
    leave_ranks()
    return 0


if __name__ == "__main__":
    run_and_leave(main)
