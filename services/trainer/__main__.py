"""``python -m services.trainer``: one rank of the trainer of one policy. Arguments first, torch later."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from services.common.errors import MillraceError
from services.common.process import die_with_parent_if_asked


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m services.trainer",
        description="Train one policy of a run: pull batches, update, publish weight versions.",
        epilog="Several ranks: torchrun --standalone --nproc-per-node=N -m services.trainer --policy P --orchestrator ADDR",
    )
    parser.add_argument("--policy", required=True, help="the policy to train, as the recipe names it")
    parser.add_argument("--orchestrator", required=True, metavar="HOST:PORT", help="the orchestrator's address")
    parser.add_argument(
        "--run-dir",
        type=Path,
        default=None,
        help="where to keep checkpoints and logs; left out, the run directory that the orchestrator names",
    )
    arguments = parser.parse_args()
    die_with_parent_if_asked()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from services.trainer.app import run_trainer

    try:
        run_trainer(arguments.policy, arguments.orchestrator, arguments.run_dir)
    except MillraceError as error:
        sys.exit(f"error: {error.message}")


if __name__ == "__main__":
    main()
