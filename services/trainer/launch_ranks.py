"""``python -m services.trainer.launch_ranks --num-ranks N ...``: the ranks of one trainer under torchrun.

Two things that torchrun does not do: it leaves with its launcher, and it passes on *how* a rank died, so that whoever
watches can tell a killed rank (start again, the trainer resumes) from a refused recipe (do not). All ranks live and
die together. It knows nothing about training.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys

from services.common.process import die_with_parent_if_asked
from services.trainer.config import DESCRIPTION


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m services.trainer.launch_ranks",
        description=f"{DESCRIPTION}Here with several ranks on this machine; other arguments go to python -m services.trainer.",
    )
    parser.add_argument("--num-ranks", type=int, required=True, help="processes that share the training (FSDP2)")
    parser.add_argument(
        "--rendezvous-port", type=int, default=0, help="port at which the ranks find each other; 0 takes a free one"
    )
    options, arguments = parser.parse_known_args()
    die_with_parent_if_asked()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun warns when it has to choose
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    meeting = ["--standalone"]
    if options.rendezvous_port:
        meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{options.rendezvous_port}"]
    launch = [*meeting, f"--nproc-per-node={options.num_ranks}", "-m", "services.trainer", *arguments]
    try:
        run.main(launch)
    except ChildFailedError as error:
        _, first = error.get_first_failure()
        return _die_alike(first.exitcode)
    except SignalException:  # told to stop: the ranks were told too, and have left
        return 0
    return 0


def _die_alike(exit_code: int) -> int:
    """The exit code of the rank that failed first, or its signal on ourselves."""
    if exit_code < 0 and -exit_code in (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS):
        if -exit_code != signal.SIGKILL:
            signal.signal(-exit_code, signal.SIG_DFL)
        os.kill(os.getpid(), -exit_code)
    return abs(exit_code)


if __name__ == "__main__":
    sys.exit(main())
