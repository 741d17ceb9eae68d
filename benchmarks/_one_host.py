"""The orchestrator where one machine plays the replicas of many: without the limits on how often one host may call.

Those limits are meant for a host with its own replicas; a thousand of them call from as many addresses. Shared by the
scripts of this folder.

    python benchmarks/_one_host.py --run-dir RUN
"""

from __future__ import annotations

import sys
from dataclasses import replace

from services.common.rpc.limits import LIMITS
from services.orchestrator.__main__ import run

OF_A_REPLICA = ("JoinPool", "ReportReplica", "StreamReports", "StreamTrajectories")
CALLS_PER_S = 100_000.0

if __name__ == "__main__":
    for method in OF_A_REPLICA:
        LIMITS[method] = replace(LIMITS[method], calls_per_s=CALLS_PER_S, burst=int(CALLS_PER_S), concurrent=8192)
    sys.exit(run())
