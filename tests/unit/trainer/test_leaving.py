"""A rank leaves on a signal, also while its main thread is inside a call that runs no Python."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.common.system.child import START_AGAIN
from services.common.telemetry.accounts import AccountState, TimeAccount, trainer_component
from services.trainer.ranks import SIGNALS, LeaveOnSignal
from tests.waiting import wait_until

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 120.0

# A mutex that is locked twice: the main thread waits in C and no signal interrupts it, as in a collective.
IN_C = """
import ctypes, sys
from services.common.telemetry.accounts import TimeAccount
from services.common.telemetry.accounts import ActivityName
from services.common.telemetry.accounts import trainer_component
from services.trainer.ranks import LeaveOnSignal
account = TimeAccount(trainer_component("model0"))
account.enter(ActivityName.TRAINING)
LeaveOnSignal(lambda: print("leave", flush=True), account, stuck_s=float(sys.argv[1])).install()
libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(256)
libc.pthread_mutex_lock(mutex)
print("waiting", flush=True)
libc.pthread_mutex_lock(mutex)
"""

# Rank 1 stops itself; rank 0 waits for it inside gloo.
IN_A_COLLECTIVE = """
import os, signal, sys
import torch, torch.distributed as dist
from services.common.telemetry.accounts import TimeAccount
from services.common.telemetry.accounts import ActivityName
from services.common.telemetry.accounts import trainer_component
from services.trainer.ranks import LeaveOnSignal
rank = int(sys.argv[2])
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[3], 2), rank=rank, world_size=2)
dist.all_reduce(torch.ones(1))
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
account = TimeAccount(trainer_component("model0"))
account.enter(ActivityName.TRAINING)
LeaveOnSignal(lambda: print("leave", flush=True), account, stuck_s=float(sys.argv[1])).install()
print("waiting", flush=True)
dist.all_reduce(torch.ones(1))
"""


def start(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def assert_leaves_by_name(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(signal.SIGTERM)
    assert "leave\n" in process.stdout, "at once, while the main thread is in C"
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == START_AGAIN
    assert "trainer: SIGTERM arrived, and this rank has made no progress for 0.4 s (training)" in errors
    assert "started again, all ranks resume together" in errors


def test_a_rank_whose_main_thread_runs_no_python_leaves_by_name() -> None:
    process = start(IN_C, "0.4")
    try:
        assert_leaves_by_name(process)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_a_rank_inside_a_collective_leaves_by_name(tmp_path: Path) -> None:
    processes = [start(IN_A_COLLECTIVE, "0.4", str(rank), str(tmp_path / "store")) for rank in range(2)]
    try:
        assert_leaves_by_name(processes[0])
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.fixture
def handlers() -> Iterator[None]:
    before = [signal.getsignal(number) for number in SIGNALS]
    yield
    signal.set_wakeup_fd(-1)
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


class Busy(TimeAccount):
    """Does a piece of work between two looks, for the first twenty; then it stands still."""

    looks = 0

    def state(self) -> AccountState:
        self.looks += 1
        self.set_progress(min(self.looks, 20))
        return super().state()


def test_a_rank_that_makes_progress_is_not_ended(handlers: None) -> None:
    account, ended = Busy(trainer_component("model0")), threading.Event()
    looks = []

    def end(code: int) -> None:
        looks.append(account.looks)
        ended.set()

    LeaveOnSignal(lambda: None, account, stuck_s=0.04, end=end).install()
    os.kill(os.getpid(), signal.SIGTERM)
    wait_until(ended.is_set)
    assert looks[0] > 20


def test_other_signals_are_no_reason_to_leave(handlers: None) -> None:
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    left = threading.Event()
    leaving = LeaveOnSignal(left.set, TimeAccount(trainer_component("model0")), end=lambda code: None)
    leaving.install()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert not left.is_set()
    os.kill(os.getpid(), signal.SIGINT)
    assert left.wait(TIMEOUT_S)
    signal.signal(signal.SIGUSR1, before)
