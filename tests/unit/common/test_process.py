"""How a process leaves: its exit code and its words are those of an ordinary end."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
        "from services.common.process import run_and_leave\n"
        "threading.Thread(target=time.sleep, args=(600,)).start()  # an ordinary end would wait for it\n"
        f"def main():\n    print('said', end='')\n    {body}\n"
        "run_and_leave(main)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    exit_code, words = ENDS[body]
    assert (done.returncode, done.stdout) == (exit_code, "said")
    assert words in done.stderr and bool(done.stderr) == bool(words)
