"""Traces that cases of one program must not leave to each other: rows 66 to 69, at every tier.

66  changes by a case of its process, its place, its parent and its descriptors
67  state that a program keeps from one execution to the next
68  traces that the next case could find
69  a case that ends its own process, or is ended: the others are judged
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from services.envgateway.judge.records import CallCase, CallTests, JudgeResult, StdinCase, StdinTests
from services.envgateway.sandbox.bare.statuses import RunStatus
from tests.integration.envgateway.cases.model import ML, OK, OL, RE, TL, WA, Bad, bad

_NUMBERS = range(3)
_SUMS = StdinTests(cases=tuple(StdinCase(stdin=f"{n} {n}", expected=f"{2 * n}") for n in _NUMBERS))
_FIRST = CallTests(entry_point="f", cases=tuple(CallCase(args=(n,), expected=1) for n in _NUMBERS))
_NOTHING = StdinTests(cases=tuple(StdinCase(stdin=f"{n}", expected="nothing") for n in _NUMBERS))


def _verdicts(*expected: RunStatus) -> Callable[[JudgeResult], bool]:
    return lambda result: [case.verdict for case in result.cases] == list(expected)


def _alike(result: JudgeResult) -> bool:
    """Whether every case has the same result as the first."""
    return len(result.cases) == len(_NUMBERS) and len({(case.verdict, case.detail) for case in result.cases}) == 1


_SPOILED = """
import atexit, builtins, ctypes, fcntl, gc, os, resource, signal, socket, sys, threading, time
def attempt(function):
    try: function()
    except (OSError, ValueError): pass
parent = os.getppid() or 1  # at tier 2 the parent is outside of the namespace, whose first process is 1
SPOIL
sys.__stdout__.write(str(sum(map(int, sys.__stdin__.readline().split()))))
"""
_SPOILERS = {
    "modules": "sys.modules.clear()",
    "builtins": "builtins.print = builtins.sum = builtins.int\ndef sum(x): return 0 + __import__('functools').reduce(int.__add__, x)",
    "a-collector": "gc.disable(); gc.set_threshold(1, 1, 1)",
    "its-place": "os.chdir('/'); os.environ.clear(); os.umask(0o777)",
    "recursion": "sys.setrecursionlimit(60)",
    "signals": "[attempt(lambda: signal.signal(n, signal.SIG_IGN)) for n in range(1, 65)]; signal.pthread_sigmask(0, range(1, 65))",
    "limits": "[attempt(lambda: resource.setrlimit(n, (0, 0))) for n in (1, 4, 6, 7, 8)]",
    "its-parents-limits": "[attempt(lambda: resource.prlimit(parent, n, (0, 0))) for n in range(16)]",
    "its-parent-killed": "attempt(lambda: os.kill(parent, 9)); attempt(lambda: os.kill(parent, 15))",
    "its-parent-stopped": "attempt(lambda: os.kill(parent, 19)); attempt(lambda: os.kill(parent, 20))",
    "its-parents-memory": "attempt(lambda: open(f'/proc/{parent}/mem', 'r+b'))\nattempt(lambda: os.listdir(f'/proc/{parent}/fd'))",
    "its-parents-cores": "attempt(lambda: os.sched_setaffinity(parent, [min(os.sched_getaffinity(0))]))",
    "everybody-killed": "signal.signal(15, signal.SIG_IGN); attempt(lambda: os.kill(-1, 15)); attempt(lambda: os.killpg(os.getpgid(parent), 15))",
    "a-thread": "threading.Thread(target=time.sleep, args=(30,), daemon=True).start()",
    "at-exit": "atexit.register(lambda: os.closerange(3, 64))",
    "descriptors": "os.closerange(3, 64)",
    "flags-of-pipes": "[attempt(lambda: os.set_blocking(fd, False)) for fd in range(8)]; attempt(lambda: fcntl.fcntl(1, 1031, 4096))",
    "a-child": "os.fork() or (time.sleep(30), os._exit(0))",
    "a-daemon-that-writes": "os.fork() or (os.setsid(), os.fork() and os._exit(0), time.sleep(.25), os.write(1, b'9' * 9), os._exit(0))",
    "many-children": "[os.fork() or (time.sleep(30), os._exit(0)) for _ in range(3)]",
    "files": "[open(f'file-{n}', 'w').write('x') for n in range(20)]; os.mkdir('d'); os.chmod('.', 0o500)",
    "a-file-come-and-gone": "open('x', 'w').close(); os.unlink('x')",
    "attributes": "attempt(lambda: os.setxattr('.', 'user.x', b'x'))",
    "an-own-socket": "a, b = socket.socketpair(); socket.send_fds(a, [b'x'], [a.fileno(), b.fileno(), 1])",
    "memory": "hog = bytearray(64 << 20)",
    "a-subreaper": "ctypes.CDLL(None).prctl(36, 1, 0, 0, 0); ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)",
}  # fmt: skip

# each f(n) counts its executions in a way of its own, and says 1 when it has found none before
_KEPT = {
    "a-list": "seen = []\ndef f(n):\n    seen.append(n)\n    return len(seen)",
    "a-default": "def f(n, seen=[]):\n    seen.append(n)\n    return len(seen)",
    "an-attribute": "def f(n):\n    f.seen = getattr(f, 'seen', 0) + 1\n    return f.seen",
    "a-module": "import math\ndef f(n):\n    math.seen = getattr(math, 'seen', 0) + 1\n    return math.seen",
    "sys.modules": "import sys\ndef f(n):\n    sys.modules['seen'] = sys.modules.get('seen', 0) + 1\n    return sys.modules['seen']",
    "builtins": "def f(n):\n    g = (i for i in ()).gi_frame.f_builtins\n    g['seen'] = g.get('seen', 0) + 1\n    return g['seen']",
}  # fmt: skip

_LEFT = {
    "a-file": ("try: found = open('left').read()\nexcept OSError: found = ''", "open('left', 'w').write('42')"),
    "a-name": ("import os\nfound = ''.join(os.listdir('.'))", "os.mkdir('42')"),
    "a-file-without-a-name": (
        "import os\nfound = ''\nfor fd in range(3, 200):\n    try: found += os.pread(fd, 9, 0).decode('latin1')\n    except OSError: pass",
        "os.write(os.open('.', os.O_TMPFILE | os.O_RDWR), b'42')",
    ),
    "a-process": (
        "import os\nfound = ''\nfor pid in range(2, 40):\n    try: found += open(f'/proc/{pid}/comm').read() if pid != os.getpid() else ''\n    except OSError: pass",
        "os.fork() or (__import__('time').sleep(30), os._exit(0))",
    ),
    "a-mode": ("import os\nfound = '' if os.stat('.').st_mode & 0o777 == 0o700 else 'mode'", "os.chmod('.', 0o777)"),
    "an-attribute": (
        "import os\ntry: found = ''.join(os.listxattr('.'))\nexcept OSError: found = ''",
        "try: os.setxattr('.', 'user.left', b'42')\nexcept OSError: pass",
    ),
}  # fmt: skip


# what one program does, and how the next would see it
_CHANNELS = {
    "file-beside": ("open('../leak', 'w').write('7')", "open('../leak').read() == '7'"),
    "file-beside-in-a-folder": ("os.makedirs('../a/b'); open('../a/b/c', 'w').write('7')", "os.path.exists('../a/b/c')"),
    "other-work-dir": ("os.rename('../work', '../old'); os.mkdir('../work')", "os.path.exists('../old')"),
    "in-the-way": ("[os.makedirs(f'../.old-{i}/x') for i in range(9)]", "len(os.listdir('..')) > 1"),
    "times": ("os.utime('.', (7, 7))", "os.stat('.').st_mtime == 7"),
    "mode": ("fd = os.open('.', 0); os.fchmod(fd, 0o1707)", "os.stat('.').st_mode & 0o7777 == 0o1707"),
    "attribute": ("os.setxattr(os.open('.', 0), 'user.x', b'7')", "os.getxattr('.', 'user.x') == b'7'"),
    "attribute-above": ("os.setxattr(os.open('..', 0), 'user.x', b'7')", "os.getxattr('..', 'user.x') == b'7'"),
    "mode-above": ("os.fchmod(os.open('..', 0), 0o777)", "os.stat('..').st_mode & 0o777 == 0o777"),
    "tmp": ("open('/tmp/rollmill-leak', 'w').write('7')", "os.path.exists('/tmp/rollmill-leak')"),
    "var-tmp": ("open('/var/tmp/rollmill-leak', 'w').write('7')", "os.path.exists('/var/tmp/rollmill-leak')"),
    "shared-memory": ("open('/dev/shm/rollmill-leak', 'w').write('7')", "os.path.exists('/dev/shm/rollmill-leak')"),
    "system-v": ("assert libc.shmget(7777, 4096, 0o1666) >= 0", "libc.shmget(7777, 4096, 0) >= 0"),
    "signal-of-stdin": ("fcntl.fcntl(0, 10, 42)", "fcntl.fcntl(0, 11) == 42"),
    "owner-of-stdin": ("fcntl.fcntl(0, 8, os.getpid())", "fcntl.fcntl(0, 9) != 0"),
    "flags-of-stdin": ("fcntl.fcntl(0, 4, 0o6000)", "fcntl.fcntl(0, 3) & 0o6000 != 0"),
    "signal-of-the-fork-servers": ("[fcntl.fcntl(fd, 10, 42) for fd in (3, 7)]", "fcntl.fcntl(3, 11) == 42"),
    "flags-of-the-fork-servers": ("[fcntl.fcntl(fd, 4, 0o4000) for fd in (3, 7)]", "fcntl.fcntl(7, 3) & 0o4000 != 0"),
    "place-in-the-fork-servers": ("[os.lseek(fd, 7, 0) for fd in (3, 7)]", "os.lseek(3, 0, 1) == 7"),
    "times-of-a-device": ("os.utime('/dev/full')", "os.stat('/dev/full').st_mtime > time.time() - 1"),
    "flags-above": (
        "fcntl.ioctl(os.open('..', 0), 0x40086602, struct.pack('q', 0xC0))",
        "fcntl.ioctl(os.open('..', 0), 0x80086601, bytes(8))[0] & 0xC0 != 0",
    ),
    "access-list-above": (
        "fd = os.open('..', 0); os.setxattr(fd, 'system.posix_acl_default', bytes.fromhex("
        "'0200000001000700ffffffff020007003930000004000500ffffffff10000700ffffffff20000100ffffffff'))",
        "os.getxattr('..', 'system.posix_acl_default') != b''",
    ),
    "semaphores": ("assert libc.semget(7777, 1, 0o1666) >= 0", "libc.semget(7777, 1, 0) >= 0"),
}  # fmt: skip


def _channel(name: str, write: str, read: str) -> Bad:
    head = "import ctypes, fcntl, os, struct, time\nlibc = ctypes.CDLL(None)\nis_first = input() == '0'\n"
    code = f"{head}try:\n    if is_first:\n        {write}\n    else: print({read})\nexcept (OSError, AssertionError): print(False)\n"
    cases = (StdinCase(stdin="0"), StdinCase(stdin="1", expected="False"))
    return bad(68, f"message-by-{name}", code, OK, tests=StdinTests(cases=cases), wall_s=3.0)


def _leaving(look: str, leave: str) -> str:
    return f"input()\n{look}\nprint(found or 'nothing')\n{leave}\n"


def _second(statement: str) -> str:
    return f"import os, signal, sys, time\na, b = map(int, input().split())\nif a == 1:\n    {statement}\nprint(a + b)"


def _ended(name: str, statement: str, verdicts: Sequence[RunStatus], **limits: object) -> Bad:
    return bad(
        69, name, _second(statement), *verdicts, tests=_SUMS,
        check=lambda result: (
            [case.verdict for case in result.cases][::2] == [OK, OK] and result.cases[1].verdict in verdicts
        ), **limits,
    )  # fmt: skip


CASES: list[Bad] = [
    *(
        bad(66, name, _SPOILED.replace("SPOIL", spoil), OK, tests=_SUMS, check=_verdicts(OK, OK, OK))
        for name, spoil in _SPOILERS.items()
    ),
    *(bad(67, name, code, OK, RE, tests=_FIRST, check=_alike) for name, code in _KEPT.items()),
    *(bad(68, name, _leaving(*parts), OK, tests=_NOTHING, check=_verdicts(OK, OK, OK)) for name, parts in _LEFT.items()),
    *(_channel(name, *parts) for name, parts in _CHANNELS.items()),
    _ended("exits", "os._exit(0)", [WA]),
    _ended("exits-with-1", "sys.exit(1)", [RE]),
    _ended("aborts", "os.abort()", [RE]),
    _ended("kills-itself", "os.kill(os.getpid(), 9)", [RE]),
    _ended("stops-itself", "os.kill(os.getpid(), 19)", [TL], wall_s=2.0),
    _ended("never-ends", "while True: pass", [TL], wall_s=2.0),
    _ended("sleeps", "time.sleep(30)", [TL], wall_s=2.0),
    _ended("takes-cpu", "while True: pass", [TL], cpu_s=0.5),
    _ended("takes-memory", "x = [bytearray(1 << 20) for _ in range(900)]", [ML]),
    _ended("floods", "print('x' * (1 << 20))", [OL]),
    _ended("recurses", "f = lambda: f(); f()", [RE]),
    _ended("children-take-cpu", "[os.fork() or any(iter(int, 1)) for _ in range(2)]; time.sleep(9)", [TL], cpu_s=0.6),
    _ended("closes-its-output", "os.close(1)", [RE, WA]),
]  # fmt: skip
