"""Any program ends with its parent, after every kind of death."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.running import is_running
from tests.waiting import wait_until

REPOSITORY = Path(__file__).resolve().parents[3]
PARENT = """
import subprocess, sys, time
from services.common.system.child import bound_to_this_process
child = subprocess.Popen(bound_to_this_process([sys.executable, "-c", "import time; time.sleep(600)"]))
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.needs("Linux")
def test_a_bound_program_dies_with_a_parent_that_is_killed() -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert is_running(child)
        parent.send_signal(signal.SIGKILL)
    wait_until(lambda: not is_running(child), "the end of the child")
