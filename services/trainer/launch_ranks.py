"""``python -m services.trainer.launch_ranks --num-ranks N ...``: starts the ranks of one trainer on this node by torchrun.

Adds three functions to torchrun. The launcher ends with its parent. The launcher's exit code tells how a rank died, so
that a supervisor can distinguish a killed rank (start again, the trainer resumes) from a refused recipe (do not start
again). The launcher notices a lost node. All ranks of all nodes start and end together.

Ranks of several nodes meet at node 0, and node k has the k-th share of the ranks (torchrun's static rendezvous). The
first rank and its publisher must run on the orchestrator's node.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from typing import TYPE_CHECKING

from services.common.system.child import DIE_WITH_PARENT, START_AGAIN, die_with_parent_if_asked, module_command
from services.trainer.config import DESCRIPTION, INTERFACES, RANKED, set_defaults

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

MEET_S = 3600.0  # how long the first node waits for the others; people start them


def main() -> int:
    options, arguments = _parser().parse_known_args()
    die_with_parent_if_asked()
    os.environ[DIE_WITH_PARENT] = str(os.getpid())  # the parent of the ranks
    set_defaults(os.environ)
    if options.interface:
        for variable in INTERFACES:
            os.environ.setdefault(variable, options.interface)  # interface names may differ between nodes
    from torch.distributed import DistError, run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from services.trainer.ranks import NodeWatch

    watch: NodeWatch | None = None
    if options.num_nodes > 1:
        watch = NodeWatch(
            options.rendezvous_host,
            options.rendezvous_port,
            options.node_rank,
            options.num_nodes,
            MEET_S,
            options.node_timeout_s,
        )
        watch.start()
    try:
        program = module_command("services.trainer", RANKED, *arguments)
        meeting = ["--standalone"]
        if options.num_nodes > 1:
            meeting = [
                f"--nnodes={options.num_nodes}",
                f"--node-rank={options.node_rank}",
                f"--master-addr={options.rendezvous_host}",
                f"--master-port={options.rendezvous_port}",
                f"--rdzv-conf=timeout={MEET_S:.0f}",
            ]
        run.main([*meeting, f"--nproc-per-node={options.num_ranks}", "--no-python", *program])
    except ChildFailedError as error:
        if watch is not None:
            watch.stop(failed=True)
        return _die_alike(_cause(error))
    except SignalException:  # the node watch or the parent stops this process and its ranks
        return START_AGAIN if watch is not None and watch.lost else 0
    except DistError as error:  # from the launchers' own store: another node's launcher is lost
        sys.stderr.write(f"trainer: the other nodes are lost: {str(error).splitlines()[0]}\n")
        return START_AGAIN
    finally:
        if watch is not None:
            watch.stop()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m services.trainer.launch_ranks",
        description=f"{DESCRIPTION}Here with several ranks on this node; other arguments go to python -m services.trainer.",
        epilog="Exit codes: that of the rank that failed first, or its signal; 75 when the ranks of another node are lost "
        "(start all nodes again; they resume together).",
    )
    parser.add_argument(
        "--num-ranks", type=int, required=True, help="ranks on this node, which share the training (FSDP2)"
    )
    parser.add_argument(
        "--rendezvous-port", type=int, default=0, help="port at which the ranks of several nodes find each other"
    )
    parser.add_argument("--num-nodes", type=int, default=1, help="nodes over which the ranks are spread")
    parser.add_argument("--node-rank", type=int, default=0, metavar="K", help="which of them this is, from 0")
    parser.add_argument(
        "--rendezvous-host", default="127.0.0.1", metavar="HOST", help="the first node, as this one reaches it"
    )
    parser.add_argument(
        "--interface", default="", help="network interface between the nodes, which must be a private network"
    )
    parser.add_argument(
        "--node-timeout-s", type=float, default=60.0, help="a node that is silent for so long is taken for lost"
    )
    return parser


def _cause(error: ChildFailedError) -> int:
    """The exit code of the first failure, ignoring ranks that lost a peer and ranks that torchrun ended."""
    failures = sorted(error.failures.values(), key=lambda failure: failure.timestamp)
    ranked = sorted(
        failures, key=lambda failure: (failure.exitcode == -signal.SIGTERM, failure.exitcode == START_AGAIN)
    )
    return int(ranked[0].exitcode)


def _die_alike(exit_code: int) -> int:
    """Return the exit code of the rank that failed first, or end this process by the same signal."""
    if exit_code < 0 and -exit_code in (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS):
        if -exit_code != signal.SIGKILL:
            signal.signal(-exit_code, signal.SIG_DFL)
        os.kill(os.getpid(), -exit_code)
    return abs(exit_code)


if __name__ == "__main__":
    sys.exit(main())
