"""A program that knows nothing of us ends with us, whatever our death."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
PARENT = """
import subprocess, sys, time
from services.common.process import bound_to_this_process
child = subprocess.Popen(bound_to_this_process([sys.executable, "-c", "import time; time.sleep(60)"]))
print(child.pid, flush=True)
time.sleep(60)
"""


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.needs("Linux")
def test_a_bound_program_dies_with_a_parent_that_is_killed() -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert not gone(child)
        parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while not gone(child):
        assert time.monotonic() < deadline, "it outlived its parent"
        time.sleep(0.01)
