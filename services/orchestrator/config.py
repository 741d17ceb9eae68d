"""Command line of the orchestrator, and the paths of its files in the run directory."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from services.common import run_files

DESCRIPTION = """\
The orchestrator: draws tasks, issues rollouts within the staleness bound, keeps every trajectory in a journal,
assembles batches, and knows which weight versions exist. Replicas and trainers dial in.
"""
EPILOG = """\
DIR is a run directory with recipe.json (`rollmill run` writes it). Started again on the same directory, even after
kill -9, the run goes on with everything that was acknowledged. Exit codes: 0 the run has ended or SIGTERM came,
2 the recipe, the data or the directory cannot be used (the message says why), 75 the disk became full while it started
(start again: the orchestrator then waits for free space).
"""


@dataclass(frozen=True, slots=True)
class Settings:
    run_dir: Path
    port: int | None = None  # instead of the recipe's

    @property
    def journal_dir(self) -> Path:
        return run_files.journal(self.run_dir)

    @property
    def lock_file(self) -> Path:
        return self.run_dir / "orchestrator.lock"


def parse(arguments: Sequence[str] | None = None) -> Settings:
    parser = argparse.ArgumentParser(
        prog="python -m services.orchestrator",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--run-dir", type=Path, required=True, metavar="DIR", help="the run directory")
    parser.add_argument("--port", type=int, help="gRPC port instead of the recipe's; 0 takes a free one")
    options = parser.parse_args(arguments)
    return Settings(run_dir=options.run_dir, port=options.port)
