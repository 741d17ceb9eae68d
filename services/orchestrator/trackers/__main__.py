"""``python -m services.orchestrator.trackers --run-dir DIR``: sends a run's metrics to the trackers of its recipe.

The orchestrator starts it. Ends with the run, or on SIGTERM after a last attempt.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from pathlib import Path

from services.common.system.child import die_with_parent_if_asked
from services.common.telemetry import logs
from services.orchestrator.trackers.process import send_rows

NICENESS = 10  # the run comes first


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m services.orchestrator.trackers", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True, metavar="DIR", help="the run directory")
    options = parser.parse_args()
    die_with_parent_if_asked()
    os.nice(NICENESS)
    logs.configure("trackers", options.run_dir)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    return 0 if all(send_rows(options.run_dir, stop).values()) else 1


if __name__ == "__main__":
    sys.exit(main())
