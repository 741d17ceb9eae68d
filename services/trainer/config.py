"""What a trainer is told on its command line. Everything else is in the recipe, which the orchestrator serves."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

DESCRIPTION = """\
The trainer of one policy: pulls batches, updates the model, publishes weight versions, writes checkpoints.
"""
EPILOG = """\
The orchestrator may be away, then or later: the trainer waits and says so. Killed at any moment and started again, it
loads its newest checkpoint, trains the recorded batches again and goes on.
Several ranks: python -m services.trainer.launch_ranks --num-ranks N --policy POLICY --orchestrator HOST:PORT
Exit codes: 0 the run has ended or SIGTERM came, 1 anything that another start may mend, 2 the recipe, the model or a
checkpoint cannot be used (the message says why), 75 another rank was lost (started again, all resume together).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One rank's arguments."""

    policy: str
    orchestrator: str
    run_dir: Path | None = None
    host: str | None = None


def parse(arguments: Sequence[str] | None = None) -> Settings:
    parser = argparse.ArgumentParser(
        prog="python -m services.trainer",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--policy", required=True, help="the policy to train, as the recipe names it")
    parser.add_argument("--orchestrator", required=True, metavar="HOST:PORT", help="the orchestrator's address")
    parser.add_argument(
        "--run-dir",
        type=Path,
        metavar="DIR",
        help="where to keep checkpoints and logs; left out, the run directory that the orchestrator names",
    )
    parser.add_argument(
        "--host",
        help="bind address of the weight publisher instead of the recipe's: where other machines fetch versions from here",
    )
    options = parser.parse_args(arguments)
    return Settings(
        policy=options.policy, orchestrator=options.orchestrator, run_dir=options.run_dir, host=options.host
    )
