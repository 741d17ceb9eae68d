"""A host's checks of a case that the host forked."""

from __future__ import annotations

import subprocess
import sys

from tests.waiting import PROCESS_S

# In a process of its own, which adopts what the case leaves, as a host does. What is left says its word when the output has
# been read, and has ended when the streams are closed.
_LEFT_BEHIND = """
import _signal, ctypes, os
from services.envgateway.sandbox.bare import messages
from services.envgateway.sandbox.bare.forkserver import host

may_go, go = os.pipe()

class Stream(host._Stream):
    def close(self):
        os.write(go, b"x")
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        super().close()

ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
_signal.pthread_sigmask(_signal.SIG_BLOCK, (17,))
stdout = Stream(1000)
case = host._Watched([stdout], 20.0)
if case.fork() == 0:
    os.write(case.note_fd, messages.READY_NOTE)
    if os.fork() == 0:
        os.read(may_go, 1)
        os.write(stdout.write_fd, b"late")
    os._exit(0)
case.wait()
print(case.can_be_recorded(9.0, 1 << 40), bytes(stdout.data))
"""


def test_a_process_that_ends_after_the_output_was_read_was_left_behind() -> None:
    told = subprocess.run(
        [sys.executable, "-c", _LEFT_BEHIND], capture_output=True, text=True, timeout=PROCESS_S, check=True
    )
    assert told.stdout == "False b''\n"
