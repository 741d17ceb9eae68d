"""How a process leaves: its exit code and its words are those of an ordinary end."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.running import is_running
from tests.waiting import PROCESS_S, wait_until

ENDS = {
    "return 3": (3, ""),
    "raise ValueError('what went wrong')": (1, "ValueError: what went wrong"),
    "import argparse; argparse.ArgumentParser().parse_args(['--nonsense'])": (2, "unrecognized arguments: --nonsense"),
    "sys.exit(0)": (0, ""),
}


@pytest.mark.parametrize("body", sorted(ENDS))
def test_a_process_that_leaves_without_a_teardown_tells_the_same(body: str) -> None:
    program = (
        "import sys, threading, time\n"
        "from services.common.system.child import run_and_leave\n"
        "threading.Thread(target=time.sleep, args=(600,)).start()  # an ordinary end would wait for it\n"
        f"def main():\n    print('said', end='')\n    {body}\n"
        "run_and_leave(main)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PROCESS_S)
    exit_code, words = ENDS[body]
    assert (done.returncode, done.stdout) == (exit_code, "said")
    assert words in done.stderr and bool(done.stderr) == bool(words)


def test_a_rank_dies_at_once_with_its_launcher_whatever_it_does_on_sigterm() -> None:
    """Another launcher starts ranks that need its ports and files; none of them waits for the end of a step."""
    rank = (
        "import os, signal, time\n"
        "from services.common.system.child import die_with_parent_if_asked\n"
        "signal.signal(signal.SIGTERM, lambda *_: None)\n"
        "die_with_parent_if_asked(signal.SIGKILL)\n"
        "print(os.getpid(), flush=True)\n"
        "time.sleep(600)\n"
    )
    launcher = (
        "import os, subprocess, sys, time\n"
        "environment = {**os.environ, 'ROLLMILL_DIE_WITH_PARENT': str(os.getpid())}\n"
        f"subprocess.Popen([sys.executable, '-c', {rank!r}], env=environment)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", launcher], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        process.stdout.read()  # ends when the rank, which holds it too, has gone
    wait_until(lambda: not is_running(pid), "the end of the rank")
