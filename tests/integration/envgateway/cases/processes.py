"""Processes, signals and time: rows 1, 8 to 13, 24 to 32, 38, 46, 48."""

from __future__ import annotations

import signal
import sys
from typing import Any

from tests.integration.envgateway.cases.model import ML, OK, RE, TL, WA, Bad, bad, first

# Six doublings are 64 processes at most, which end after five seconds.
_FORK_BOMB = """
import os, time
refused = 0
for _ in range(6):
    try:
        os.fork()
    except OSError:
        refused += 1
os.write(1, b"x")
if refused:
    os.write(2, b"refused")
time.sleep(5)
"""
_DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        CLOSE
        end = time.time() + 30.0  # longer than the program may take
        while time.time() < end:
            WORK
        open("late", "w").write("x")
        os._exit(0)
    os._exit(0)
os.wait()
print("parent done", flush=True)
"""
_IGNORING = """
import signal, time
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
end = time.time() + 20
"""
_ATTEMPTS = """
import os, resource
def attempt(name, function):
    try:
        function()
        print(name, "done")
    except (OSError, ValueError):
        print(name, "refused")
attempt("files", lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (10**6, 10**6)))
attempt("fsize", lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1)))
attempt("cpu", lambda: resource.setrlimit(resource.RLIMIT_CPU, (-1, -1)))
attempt("nproc", lambda: resource.setrlimit(resource.RLIMIT_NPROC, (-1, -1)))
attempt("nice", lambda: os.setpriority(os.PRIO_PROCESS, 0, -5))
attempt("realtime", lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)))
attempt("uid", lambda: os.setuid(0) if os.getuid() else (_ for _ in ()).throw(OSError()))
"""
_BURN = """
import os, threading, time
def burn(end=time.time() + 18):
    while time.time() < end:
        sum(range(1000))
"""


def _exit(code: str, exit_code: int, verdict: object = None) -> Bad:
    wanted = verdict or (OK if exit_code == 0 else RE)
    name = f"exit-{code.splitlines()[-1][:24]}"
    program = f"print('kept', flush=True)\n{code}"
    return bad(30, name, program, wanted, expected="kept",  # type: ignore[arg-type]
               check=lambda r: first(r).exit_code == exit_code and first(r).stdout == "kept\n")  # fmt: skip


def _killed_by(number: int) -> object:
    return lambda r: first(r).signal == number


def _overflow(r: Any) -> bool:
    """The stack overflows, or from Python 3.12 on the interpreter may prevent the overflow, for any limit that the
    program sets."""
    seen = sys.version_info >= (3, 12) and "RecursionError" in first(r).stderr
    return bool(seen or first(r).signal == signal.SIGSEGV or first(r).verdict is ML)  # the stack is memory


CASES: list[Bad] = [
    bad(1, "fork-bomb", _FORK_BOMB, TL, RE, wall_s=3.0,
        check=lambda r: len(first(r).stdout) <= 8 and ("refused" in first(r).stderr or "processes" in first(r).detail)),
    bad(1, "fork-bomb-by-subprocess", "import subprocess, sys\nfor _ in range(20):\n  subprocess.Popen([sys.executable, "
        "'-c', 'import time; time.sleep(2)'])", RE),
    bad(8, "zombies", "import os, time\nfor _ in range(5):\n  if os.fork() == 0: os._exit(0)\ntime.sleep(0.2)\nprint('ok')",
        OK, expected="ok"),
    bad(9, "daemon-outlives-its-parent", _DAEMON.replace("CLOSE", "pass").replace("WORK", "time.sleep(0.01)"), OK,
        expected="parent done"),
    bad(10, "daemon-keeps-the-streams", _DAEMON.replace("CLOSE", "os.dup2(1, 2)").replace("WORK", "time.sleep(0.01)"), OK,
        expected="parent done", check=lambda r: first(r).cpu_s < 0.5),
    bad(11, "closed-streams", "import os, sys\nos.close(1)\nos.close(2)\nsys.exit(0)", OK, expected=""),
    bad(11, "closed-streams-but-output-expected", "import os, sys\nos.close(1)\nos.close(2)\nsys.exit(0)", WA, expected="x"),
    bad(11, "closed-stream-objects", "import sys\nsys.stdout.close()\nsys.stderr.close()", OK, expected=""),
    bad(12, "closes-everything-and-sleeps", "import os, time\nos.closerange(0, 4096)\ntime.sleep(20)", TL, wall_s=0.5),
    bad(13, "kills-everybody", "import os, time\nos.kill(-1, 9)\ntime.sleep(0.2)\nprint('after')", RE, OK),
    bad(13, "kills-its-parent", "import os, time\nos.kill(os.getppid(), 9)\ntime.sleep(0.2)\nprint('after')", RE),
    bad(13, "kills-the-first-process", "import os, time\nos.kill(1, 9)\ntime.sleep(0.2)\nprint('after')", RE),
    bad(13, "kills-the-judge", "import os, time\nos.kill(JUDGE_PID, 9)\ntime.sleep(0.2)\nprint('after')", RE),
    bad(13, "kills-its-group", "import os\nos.killpg(0, 9)", RE, check=_killed_by(signal.SIGKILL)),  # type: ignore[arg-type]
    bad(24, "ignores-signals-and-spins", _IGNORING + "while time.time() < end: pass", TL, wall_s=0.5,
        check=lambda r: first(r).wall_s < 15),
    bad(24, "ignores-signals-and-sleeps", _IGNORING + "time.sleep(20)", TL, wall_s=0.5),
    bad(25, "disarms-alarms", "import signal, time\nsignal.alarm(0)\nsignal.setitimer(signal.ITIMER_REAL, 0)\ntime.sleep(20)",
        TL, wall_s=0.5, check=lambda r: first(r).detail == "wall time"),
    bad(26, "sleeps-just-over-the-limit", "import time; time.sleep(0.55)", TL, wall_s=0.5),
    bad(26, "sleeps-just-under-the-limit", "import time; time.sleep(0.45)", OK, TL, wall_s=0.5,
        # On a busy machine its end may be noticed late; but it is never stopped early.
        check=lambda r: first(r).verdict is OK or first(r).wall_s >= 0.5),
    bad(26, "sleeps-well-under-the-limit", "import time; time.sleep(0.1)", OK, wall_s=10.0),
    bad(27, "burns-in-processes", _BURN + "for _ in range(3): os.fork()\nburn()", TL, wall_s=20.0, cpu_s=0.8,
        check=lambda r: first(r).detail == "CPU time" and first(r).cpu_s >= 0.8),
    bad(27, "burns-in-threads", _BURN + "for _ in range(3): threading.Thread(target=burn).start()\nburn()", TL, wall_s=20.0,
        cpu_s=0.5, check=lambda r: first(r).detail == "CPU time"),
    # twenty children of 0.1 s CPU each; their ends are ignored, so the kernel charges their time to nobody
    bad(27, "burns-in-children-that-nobody-waits-for", """
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for _ in range(20):
    child = os.fork()
    if child == 0:
        while time.process_time() < 0.1: pass
        os._exit(0)
    try: os.waitpid(child, 0)
    except ChildProcessError: pass
""", TL, wall_s=20.0, cpu_s=0.5),
    bad(28, "huge-power", "pow(3, 10**9)", TL, wall_s=0.5),
    bad(28, "regex-backtracking", "import re; re.match(r'(a+)+$', 'a' * 40 + 'b')", TL, wall_s=0.5),
    bad(28, "big-sort", "import itertools\nx = [(i * 7919) % 1000003 for i in range(1000)]\n"
        "any(sorted(x, key=lambda v: sorted(x)) == 1 for _ in itertools.repeat(0, 100))", TL, wall_s=0.5),
    bad(29, "raises-its-limits", _ATTEMPTS, OK,
        expected="".join(f"{n} refused\n" for n in ("files", "fsize", "cpu", "nproc", "nice", "realtime", "uid"))),
    _exit("import sys; sys.exit()", 0),
    _exit("exit(0)", 0),
    _exit("quit(3)", 3),
    _exit("raise SystemExit('sorry')", 1),
    _exit("import sys; sys.exit(256)", 0),
    _exit("import sys; sys.exit(-1)", 255),
    _exit("import threading, sys\nt = threading.Thread(target=sys.exit, args=(5,)); t.start(); t.join()", 0),
    bad(32, "prints-at-the-end", "import atexit\natexit.register(print, 'atexit')\nclass A:\n  def __del__(self): print('del')\n"
        "a = A()", OK, expected="atexit\ndel\n"),
    bad(32, "thread-ends-later", "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()",
        OK, expected="late"),
    bad(32, "thread-never-ends", "import threading, time\nthreading.Thread(target=lambda: time.sleep(20)).start()", TL, wall_s=0.5),
    bad(38, "recursion", "def f(): f()\nf()", RE, check=lambda r: "RecursionError" in first(r).stderr),
    bad(38, "recursion-without-limit", "import sys\nsys.setrecursionlimit(10**9)\ndef f(): return f()\nf()", RE, ML, wall_s=20.0),
    bad(38, "recursion-that-overflows-the-stack", "import sys\nsys.setrecursionlimit(10**9)\n"
        "def f(x): return sorted([1], key=f)\nf(1)", RE, ML, wall_s=20.0, check=_overflow),
    bad(38, "recursion-in-c", "import sys\nsys.setrecursionlimit(1000)\nx = []\nfor _ in range(100000): x = [x]\nrepr(x)", RE),
    bad(38, "recursion-in-json", "import json\njson.loads('[' * 100000)", RE),
    bad(46, "leaves-a-burner", _DAEMON.replace("CLOSE", "pass").replace("WORK", "pass"), OK, expected="parent done"),
    bad(48, "segmentation-fault", "import ctypes; ctypes.string_at(0)", RE, check=_killed_by(signal.SIGSEGV)),  # type: ignore[arg-type]
    bad(48, "abort", "import os; os.abort()", RE, check=_killed_by(signal.SIGABRT)),  # type: ignore[arg-type]
    bad(48, "floating-point-exception", "import os, signal; os.kill(os.getpid(), signal.SIGFPE)", RE,
        check=_killed_by(signal.SIGFPE)),  # type: ignore[arg-type]
    bad(48, "illegal-instruction", "import os, signal; os.kill(os.getpid(), signal.SIGILL)", RE,
        check=_killed_by(signal.SIGILL)),  # type: ignore[arg-type]
]  # fmt: skip
