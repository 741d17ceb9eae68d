"""Hooks that ``chaos.py`` puts into processes of a run: a clock that jumps, and a list of acknowledgements.

    python -m benchmarks._chaos_hooks MODULE ARGUMENTS     runs a module as ``python -m`` would, with the hooks

Importing this module installs the hooks. They look at the environment at each call, so that a forked process has its
own: ``CHAOS_CLOCKS`` is a directory in which a file named by a pid holds seconds that this process's ``time.time`` is
wrong by; ``CHAOS_ACKS`` one in which each process appends the slots of accepted records.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from grpc import _channel as grpc_channel
from grpc.aio import _utils as grpc_utils

CLOCKS, ACKS = "CHAOS_CLOCKS", "CHAOS_ACKS"
LOOK_S = 0.1

_true_time, _true_time_ns = time.time, time.time_ns
_installed = False
_looked: tuple[float, float] = (-1.0, 0.0)  # when the file was read last, and what it held


def _wrong_by() -> float:
    global _looked
    now = time.monotonic()
    if now - _looked[0] > LOOK_S:
        try:
            seconds = float((Path(os.environ[CLOCKS]) / str(os.getpid())).read_text())
        except (KeyError, FileNotFoundError, ValueError):
            seconds = 0.0
        _looked = (now, seconds)
    return _looked[1]


def _install_clock() -> None:
    time.time = lambda: _true_time() + _wrong_by()
    time.time_ns = lambda: _true_time_ns() + int(_wrong_by() * 1e9)
    # gRPC makes deadlines of time.time in Python, and its core compares them with the machine's clock, which jumps as well
    # when a machine's clock does. Here it does not: with a jump every call would be over when it begins.
    true_clock = SimpleNamespace(**{**vars(time), "time": _true_time})
    grpc_channel.time = true_clock  # type: ignore[attr-defined]
    grpc_utils.time = true_clock  # type: ignore[attr-defined]


def _install_acknowledgements() -> None:
    from services.common.pb import pool_pb2
    from services.inference.records_out import TrajectorySender

    original = TrajectorySender._acknowledge

    def noted(self: TrajectorySender, ack: pool_pb2.RecordAck) -> None:
        request = self._unacknowledged.get(ack.record_number)
        original(self, ack)
        if request is None or ack.outcome != pool_pb2.RECORD_OUTCOME_ACCEPTED or ACKS not in os.environ:
            return
        record: Any = request.trajectory if request.WhichOneof("record") == "trajectory" else request.failure
        with (Path(os.environ[ACKS]) / str(os.getpid())).open("a") as file:
            file.write(f"{record.task_group_id}/{record.index}\n")

    TrajectorySender._acknowledge = noted  # type: ignore[method-assign]


def share_of_digits(task: Any, completion: str) -> float:
    """A reward that differs between the answers of an untrained model."""
    return sum(character.isdigit() for character in completion) / max(1, len(completion))


def install() -> None:
    """Once in a process, and in its forks."""
    global _installed
    if not _installed:
        _install_clock()
        _install_acknowledgements()
        _installed = True


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    # Under its own name, or the hooks would be installed twice: this file is `__main__` here.

    install()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
elif os.environ.get("CHAOS_HOOKS"):
    install()  # in the fork server, which imports it last
