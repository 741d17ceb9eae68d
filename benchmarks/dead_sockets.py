"""Kills the sockets under episodes again and again, and counts the rewards that a dead socket made: none.

Each part plays episodes whose policy always wins, so that a reward of 0 can only come from a failure. Meanwhile the sockets
die: their server is killed and started again, every connection is cut, bytes are lost, the server does not answer.

    zero_rewards   rollouts that ended with a reward of 0: must be 0
    deaths         how often sockets were killed
    scored         rollouts that ended with a reward
    retried        infrastructure failures after which a rollout was played again
    parts          the same for each kind of server

``PARTS`` has one entry for each kind of server: a module with ``soak(deaths) -> Soak`` and ``missing() -> str | None``.

    python benchmarks/dead_sockets.py [--quick] [--deaths 50] [--only NAME]
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses

from benchmarks import _dead_mcp, _dead_openenv
from benchmarks._report import report_facts

PARTS = {"openenv": _dead_openenv, "mcp": _dead_mcp}
QUICK_DEATHS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description="rewards under sockets that die")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_DEATHS} deaths for each kind of server")
    parser.add_argument("--deaths", type=int, default=50, help="deaths for each kind of server")
    parser.add_argument("--only", choices=sorted(PARTS), help="one kind of server")
    arguments = parser.parse_args()
    deaths = QUICK_DEATHS if arguments.quick else arguments.deaths
    found, left_out = {}, {}
    for name, part in PARTS.items():
        if arguments.only not in (None, name):
            continue
        if reason := part.missing():
            left_out[name] = reason
            continue
        found[name] = asyncio.run(part.soak(deaths))
        print(name, found[name], flush=True)
    sums = {
        field: sum(getattr(soak, field) for soak in found.values())
        for field in ("zero_rewards", "deaths", "scored", "retried")
    }
    report_facts(
        "dead_sockets",
        **(sums if found else {}),
        parts={name: dataclasses.asdict(soak) for name, soak in found.items()},
        left_out=left_out,
    )


if __name__ == "__main__":
    main()
