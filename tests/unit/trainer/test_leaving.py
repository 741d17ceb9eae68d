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

from services.trainer.ranks import SIGNALS, leave_on_signal

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 120.0

# A mutex that is locked twice: the main thread waits in C and no signal interrupts it, as in a collective.
IN_C = """
import ctypes
from services.trainer.ranks import leave_on_signal
leave_on_signal(lambda: print("leave", flush=True))
libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(256)
libc.pthread_mutex_lock(mutex)
print("waiting", flush=True)
libc.pthread_mutex_lock(mutex)
"""


def test_a_rank_whose_main_thread_runs_no_python_is_told_to_leave() -> None:
    process = subprocess.Popen([sys.executable, "-c", IN_C], cwd=ROOT, text=True, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGTERM)
        assert "leave\n" in process.stdout, "at once, while the main thread is in C"
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def handlers() -> Iterator[None]:
    before = [signal.getsignal(number) for number in SIGNALS]
    yield
    signal.set_wakeup_fd(-1)
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


def test_other_signals_are_no_reason_to_leave(handlers: None) -> None:
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    left = threading.Event()
    leave_on_signal(left.set)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert not left.is_set()
    os.kill(os.getpid(), signal.SIGINT)
    assert left.wait(TIMEOUT_S)
    signal.signal(signal.SIGUSR1, before)
