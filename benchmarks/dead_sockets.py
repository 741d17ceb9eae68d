"""Kills the sockets under episodes again and again, and counts the rewards that a dead socket made: none.

Each part plays episodes whose policy always wins, so that a reward of 0 can only come from a failure. Meanwhile the sockets
die: their server is killed and started again, every connection is cut, bytes are lost, the server does not answer.

    zero_rewards   rollouts that ended with a reward of 0: must be 0
    deaths         how often sockets were killed
    scored         rollouts that ended with a reward
    retried        infrastructure failures after which a rollout was played again
    parts          the same for each kind of server

    python benchmarks/dead_sockets.py [--quick] [--deaths 50] [--only NAME]
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses

from benchmarks._dead_mcp import missing as mcp_missing
from benchmarks._dead_mcp import soak as soak_mcp
from benchmarks._dead_openenv import missing as openenv_missing
from benchmarks._dead_openenv import soak as soak_openenv
from benchmarks._report import report_facts

PARTS = {"openenv": (openenv_missing, soak_openenv), "mcp": (mcp_missing, soak_mcp)}
QUICK_DEATHS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description="rewards under sockets that die")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_DEATHS} deaths for each kind of server")
    parser.add_argument("--deaths", type=int, default=50, help="deaths for each kind of server")
    parser.add_argument("--only", choices=sorted(PARTS), help="one kind of server")
    arguments = parser.parse_args()
    deaths = QUICK_DEATHS if arguments.quick else arguments.deaths
    found, left_out = {}, {}
    for name, (missing, soak) in PARTS.items():
        if arguments.only not in (None, name):
            continue
        if reason := missing():
            left_out[name] = reason
            continue
        found[name] = asyncio.run(soak(deaths))
        print(name, found[name], flush=True)
    sums = {
        field: sum(getattr(one, field) for one in found.values())
        for field in ("zero_rewards", "deaths", "scored", "retried")
    }
    report_facts(
        "dead_sockets",
        **(sums if found else {}),
        parts={name: dataclasses.asdict(one) for name, one in found.items()},
        left_out=left_out,
    )


if __name__ == "__main__":
    main()
