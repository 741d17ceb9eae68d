"""``services.trainer.launch_ranks`` in a process whose imports are done: ``python -m tests.forked_ranks ARGUMENTS``, forked
by ``tests.forks``.

torchrun's ranks are forked here too, which saves each five CPU seconds. All else is the launcher's code and torchrun's.
``tests/e2e/test_trainer_over_nodes`` starts the launcher itself, with ranks that import torch.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

from services.cli.run.processes import Adopted
from services.trainer import launch_ranks
from tests.forked_launch import ForkedServer


def ranks_of(launcher: int) -> list[int]:
    """The pids of a launcher's ranks, in the order of their start; its first child is its fork server."""
    return children_of(launcher)[1:]


def children_of(parent: int) -> list[int]:
    """The pids of a process's children, in the order of their start."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        if int(fields[1]) == parent:
            found.append((int(fields[19]), int(entry.name)))  # in clock ticks since the machine's start, then the pid
    return [pid for _, pid in sorted(found)]


def main() -> int:
    server = ForkedServer()  # before any thread starts
    output = Path("/proc/self/fd/2").resolve()

    def fork(_: SubprocessHandler, command: Sequence[str], environment: Mapping[str, str]) -> Adopted:
        return server.start(command, environment, output)

    SubprocessHandler._popen = fork  # type: ignore[assignment,method-assign]
    return launch_ranks.main()


if __name__ == "__main__":
    sys.exit(main())
