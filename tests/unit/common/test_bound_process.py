"""Any program ends with its parent, after every kind of death."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.running import is_running
from tests.waiting import wait_until

REPOSITORY = Path(__file__).resolve().parents[3]


PROGRAM = "import os, time; print(os.getpid(), file=open({path!r}, 'w'), flush=True); time.sleep(600)"
AGENT = """
import asyncio, sys
from services.inference.workflows.external_agent import run_command
asyncio.run(run_command([sys.executable, "-c", {program!r}], {{}}, "http://127.0.0.1:9/v1", "s", {{}}))
"""


@pytest.mark.needs("Linux")
def test_a_program_of_a_service_dies_with_a_service_that_is_killed(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    code = AGENT.format(program=PROGRAM.format(path=str(told)))
    with subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(REPOSITORY)}) as service:
        wait_until(lambda: told.exists() and told.read_text(), "the program's start")
        pid = int(told.read_text())
        assert is_running(pid)
        service.kill()
    try:
        wait_until(lambda: not is_running(pid), "the end of the program", timeout_s=10.0)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
