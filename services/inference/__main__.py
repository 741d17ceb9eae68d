"""``python -m services.inference``: one replica. Arguments first, torch later."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path

from services.common.errors import DeadlineError, InfrastructureError, RollmillError
from services.common.system.child import DIE_WITH_PARENT, LEFT, START_AGAIN, die_with_parent_if_asked
from services.common.telemetry.logs import quiet_grpc, settle


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m services.inference",
        description="Serve a run with rollouts: join its orchestrator, play task groups, follow the weight versions. "
        "Further replicas may join at any time, from any machine that reaches the orchestrator.",
    )
    parser.add_argument("--orchestrator", required=True, metavar="HOST:PORT", help="the orchestrator's address")
    parser.add_argument(
        "--name",
        default="a",
        help="section of the recipe's `inference` whose settings to use; "
        "a name that the recipe lacks takes the first section's, on a free port",
    )
    parser.add_argument("--replica-id", default=None, help="the replica's name in the pool; left out, its --name")
    parser.add_argument("--port", type=int, default=None, help="gRPC port instead of the recipe's; 0 takes a free one")
    parser.add_argument(
        "--host",
        default=None,
        help="bind address instead of the recipe's: where other machines fetch weights from here",
    )
    parser.add_argument(
        "--run-dir",
        type=Path,
        default=None,
        metavar="DIR",
        help="where this machine has starting checkpoints of the run, and logs go; left out, the orchestrator's run directory",
    )
    parser.add_argument("--num-slots", type=int, default=None, help="rollouts at once instead of the recipe's number")
    arguments = parser.parse_args()
    die_with_parent_if_asked()
    settle()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    quiet_grpc()
    from services.common.security import identity
    from services.common.security.keys import Role
    from services.inference.app import run_replica

    try:
        identity.configure(Role.INFERENCE)
        asyncio.run(
            run_replica(
                orchestrator=arguments.orchestrator,
                name=arguments.name,
                replica_id=arguments.replica_id or arguments.name,
                port=arguments.port,
                num_slots=arguments.num_slots,
                host=arguments.host,
                run_dir=arguments.run_dir,
            )
        )
    except (
        InfrastructureError,
        DeadlineError,
    ) as error:  # a restarted process may find a working engine or orchestrator
        sys.stderr.write(f"error: {error.message}\n")
        sys.exit(START_AGAIN)
    except RollmillError as error:
        sys.exit(f"error: {error.message}")
    if DIE_WITH_PARENT in os.environ:
        sys.exit(LEFT)


if __name__ == "__main__":
    main()
