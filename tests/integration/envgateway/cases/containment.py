"""Forbidden gains of a program by its bytes, its memory or its files: rows 54 to 59, at every tier.

54  a harness's channel: garbage, half frames, frames of others; never another try
55  the sandbox's own signals; never another try
56  memory that is in no resident set
57  files beside the work dir
58  the gateway and other processes of the same user
59  locks, leases, notifications and flags of files that all may read, and resources that the machine has once
"""

from __future__ import annotations

from services.envgateway.judge.records import AssertTests, CallCase, CallTests, StdinCase, StdinTests
from services.envgateway.sandbox.bare.statuses import RunStatus
from tests.integration.envgateway.cases.model import ML, OK, RE, WA, Bad, bad, first

ABOUT_THE_PROGRAM = tuple(verdict for verdict in RunStatus if verdict.is_about_the_program)
_NOT_RIGHT = tuple(v for v in ABOUT_THE_PROGRAM if v not in (OK, RunStatus.INVALID_REQUEST))

_LOOP = AssertTests(  # two conditions in one assert are opaque: these tests run with the program
    tests="def check(candidate):\n    for n in [3, 4]:\n        assert n and candidate(n) == 5\n", entry_point="f"
)
_PASSED_ON = AssertTests(
    tests="def check(candidate):\n    for n in [3, 4]:\n        assert candidate([candidate(n)]) == 5\n",
    entry_point="f",
)
_FED_BACK = AssertTests(
    tests="def check(candidate):\n    for n in [3, 4]:\n        assert candidate(candidate(n)) == 5\n", entry_point="f"
)
_CALL = CallTests(entry_point="f", cases=(CallCase(args=(3,), expected=5),))

_IN_THE_CHANNEL = {
    "garbage": "os.write(6, b'\\xff' * 4)",
    "zeros": "os.write(6, b'\\0' * 4)",
    "half-a-frame": "os.write(6, b'\\0\\0\\0\\7ab'); os._exit(0)",
    "half-and-sleep": "os.write(6, b'\\0\\0\\0\\7ab'); time.sleep(30)",
    "megabytes": "os.write(6, b'\\0\\0\\1\\0' + b'x' * 40000); os._exit(3)",
    "a-flood": "[os.write(6, b'\\0\\0\\0\\1x' * 9000) for _ in range(4000)]",
    "nested": "os.write(6, struct.pack('!I', 6000) + b'[' * 3000 + b']' * 3000); os._exit(0)",
    "wrong-tags": "t = b'[\"d\",[\"f\",\"zz\"],[\"i\",\"0xg\"],{},[\"T\",[\"q\"]]]'; os.write(6, struct.pack('!I', len(t)) + t); os._exit(0)",
    "a-lone-surrogate": "t = b'\"\\\\ud800\"'; os.write(6, struct.pack('!I', len(t)) + t); os._exit(0)",
    "closed": "os.close(6)",
    "asks-closed": "os.close(5); time.sleep(.05)",
    "reads-its-asks": "os.set_blocking(5, False); os.read(5, 9)",
    "all-closed": "os.closerange(0, 64)",
    "stopped": "os.kill(os.getpid(), 19)",
    "killed": "os.kill(os.getpid(), 9)",
    "a-child-writes": "os.fork() or [os.write(6, b'\\xff\\xff') for _ in range(9)]",
    "daemon": "os.fork() or (os.setsid(), os.fork(), time.sleep(30))",
    "swallows": "open('/proc/self/fd/6', 'rb', 0).read(1)",
}  # fmt: skip


# answers that the tests hand to the program again
_FED = {
    "depth": "def f(n):\n    v = []\n    for _ in range(450): v = [v]\n    return v\n",
    "depth-in-dicts": "def f(n):\n    v = 1\n    for _ in range(199): v = {1: v}\n    return v\n",
    "a-cycle": "def f(n):\n    v = []\n    v.append(v)\n    return v\n",
    "no-data": "def f(n):\n    t = b'{\"value\":[\"o\",\"x\"]}'\n    os.write(6, struct.pack('!I', len(t)) + t)\n    return 1\n",
    "a-chain": "class ListNode:\n    val = 1\ndef f(n):\n    v = ListNode()\n    v.next = v\n    return v\n",
    "a-handle": "def f(n):\n    t = b'{\"value\":[\"h\",99]}'\n    os.write(6, struct.pack('!I', len(t)) + t)\n    return 1\n",
    "a-handle-of-text": "def f(n):\n    t = b'{\"value\":[\"h\",\"x\"]}'\n    os.write(6, struct.pack('!I', len(t)) + t)\n    return 1\n",
    "changes": "def f(n):\n    t = b'{\"value\":1,\"changed\":[[0,[\"o\",\"x\"]],[7,1]]}'\n    os.write(6, struct.pack('!I', len(t)) + t)\n    return 1\n",
    "an-odd-error": "def f(n):\n    t = b'{\"error\":[\"l\",\"OSError\"],\"message\":[1,{}]}'\n    os.write(6, struct.pack('!I', len(t)) + t)\n    return 1\n",
    "an-exit": "def f(n):\n    t = b'{\"error\":[\"l\",\"SystemExit\",\"KeyboardInterrupt\"],\"message\":\"\"}'\n    os.write(6, struct.pack('!I', len(t)) + t)\n    return 1\n",
}  # fmt: skip


def _in_the_channel(name: str, code: str) -> list[Bad]:
    function = f"import os, struct, time\ndef f(n):\n    {code}\n    return 6\n"
    at_once = f"import os, struct, time\n{code}\ndef f(n):\n    return 6\n"
    wall_s = 0.5 if name in ("half-and-sleep", "stopped", "swallows", "daemon") else 2.0
    return [
        bad(54, f"tests-{name}", function, *_NOT_RIGHT, tests=_LOOP, wall_s=wall_s),
        bad(54, f"tests-at-once-{name}", at_once, *_NOT_RIGHT, tests=_LOOP, wall_s=wall_s),
        bad(54, f"call-{name}", function, *_NOT_RIGHT, tests=_CALL, wall_s=wall_s),
    ]


_SIGNALS = {
    "read-by-name": "os.read(os.open('/proc/self/fd/4', os.O_RDONLY | os.O_NONBLOCK), 9)",
    "read": "os.set_blocking(4, False); os.read(4, 9)",
    "both-ways": "os.read(os.open('/proc/self/fd/4', os.O_RDWR | os.O_NONBLOCK), 9)",
    "closed": "os.close(4)",
    "says-failed": "os.write(4, b'E nothing works')",
    "flood": "os.set_blocking(4, False); [os.write(4, b'E' * 4096) for _ in range(999)]",
    "shut": "import socket; socket.socket(fileno=os.dup(4)).shutdown(2)",
    "descriptors": "import socket; socket.send_fds(socket.socket(fileno=os.dup(4)), [b'x'], [0, 1])",
    "of-the-parent": "os.read(os.open(f'/proc/{os.getppid()}/fd/4', os.O_RDONLY | os.O_NONBLOCK), 9)",
}


def _signals(name: str, code: str) -> Bad:
    text = f"import os\ntry:\n    {code}\nexcept (OSError, ValueError): pass\nprint('done', flush=True)\nos._exit(7)\n"
    return bad(55, name, text, RE)


_KEPT = "time.sleep(.15)\nprint('kept')\n"
_MEMORY = {
    "shared": "m = mmap.mmap(-1, 400 << 20)\nfor i in range(0, 400 << 20, 1 << 20):\n"
    "    m[i:i + (1 << 20)] = b'x' * (1 << 20); m.madvise(mmap.MADV_DONTNEED, i, 1 << 20)\n",
    "many-small": "keep = []\nfor i in range(800):\n    m = mmap.mmap(-1, 1 << 19); m[:] = b'x' * (1 << 19)\n"
    "    m.madvise(mmap.MADV_DONTNEED); keep.append(m)\n",
    "resized": "keep = []\nfor i in range(25):\n    m = mmap.mmap(-1, 16 << 20); m[:] = b'x' * (16 << 20)\n"
    "    libc.munmap(ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(m)) + 4096), (16 << 20) - 4096)\n"
    "    keep.append(m)\n",
    "zeros": "fd = os.open('/dev/zero', os.O_RDWR)\nm = mmap.mmap(fd, 400 << 20)\nfor i in range(0, 400 << 20, 1 << 20):\n"
    "    m[i:i + (1 << 20)] = b'x' * (1 << 20); m.madvise(mmap.MADV_DONTNEED, i, 1 << 20)\n",
    "memfd": "fd = os.memfd_create('x')\nfor i in range(400): os.write(fd, b'x' * (1 << 20))\n",
    "secret": "assert libc.syscall(447, 0) >= 0\n",
    "named": "with open('/dev/shm/x', 'wb') as f:\n    for i in range(400): f.write(b'x' * (1 << 20))\n",
    "system-v": "assert libc.shmget(0, 400 << 20, 0o1600) >= 0\n",
    "huge-pages-in-pipes": "keep = []\nfor n in range(200):\n"
    "    if n % 8 == 0: keep.append(pipe := os.pipe())\n"
    "    keep.append(m := mmap.mmap(-1, 4 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))\n"
    "    at = (ctypes.addressof(ctypes.c_char.from_buffer(m)) + (2 << 20) - 1) & ~((2 << 20) - 1)\n"
    "    libc.madvise(ctypes.c_void_p(at), ctypes.c_size_t(2 << 20), 14); ctypes.memset(at, 1, 2 << 20)\n"
    "    if libc.syscall(278, pipe[1], (ctypes.c_size_t * 2)(at, 4096), 1, 0) < 0: raise OSError\n"
    "    libc.munmap(at, 2 << 20)\n",
    "first-thread-ends": "import threading\ndef take():\n    time.sleep(.05)\n    keep = bytearray(b'1' * (300 << 20)); time.sleep(.3)\n"
    "    os.write(1, b'kept'); os._exit(0)\nthreading.Thread(target=take).start()\nlibc.syscall(60, 0)\n",
    "over-children": "for _ in range(6):\n    if os.fork() == 0: break\nm = mmap.mmap(-1, 60 << 20)\n"
    "for i in range(0, 60 << 20, 1 << 20):\n"
    "    m[i:i + (1 << 20)] = b'x' * (1 << 20); m.madvise(mmap.MADV_DONTNEED, i, 1 << 20)\ntime.sleep(1)\n",
}  # fmt: skip


def _memory(name: str, code: str) -> Bad:
    text = f"import ctypes, mmap, os, time\nlibc = ctypes.CDLL(None, use_errno=True)\nlibc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]\n{code}{_KEPT}"
    return bad(56, name, text, ML, RE, check=lambda result: "kept" not in first(result).stdout, wall_s=20.0)


_BUFFERS = """
import fcntl, os, socket, time
for _ in range(6):
    if os.fork() == 0:
        break
keep = []
try:
    while True:
        a, b = socket.socketpair() if SOCKETS else os.pipe()
        for end in (a, b) if SOCKETS else (b,):
            try:
                if SOCKETS:
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 24)
                else:
                    fcntl.fcntl(end, 1031, 1 << 20)
            except OSError:
                pass
            os.set_blocking(end if isinstance(end, int) else end.fileno(), False)
            try:
                while True:
                    os.write(end if isinstance(end, int) else end.fileno(), b"x" * 4096)
            except OSError:
                pass
        keep.append((a, b))
except OSError:
    pass
time.sleep(.5)
"""
_DISK = """
import os
for where in ("..", ".", "../beside", "../../x"):
    try:
        os.makedirs(where, exist_ok=True)
        for i in range(40):
            with open(f"{where}/f{i}", "wb") as f:
                f.write(b"x" * (1 << 19))
    except OSError:
        pass
import time
time.sleep(.3)
print("kept")
"""
_BESIDE = """
import os, time
for where in ("..", "../x", "."):
    try:
        os.makedirs(where, exist_ok=True)
        for i in range(20):
            open(f"{where}/f{i}", "wb").write(b"x" * (1 << 19))
    except OSError as error:
        pass
time.sleep(.5)
print(sum(os.path.getsize(os.path.join(d, f)) for d, _, fs in os.walk("..") for f in fs) > 4 << 20)
"""
_GATEWAY = """
import ctypes, fcntl, os, resource, signal, socket, struct
libc = ctypes.CDLL(None, use_errno=True)
pid, done = JUDGE_PID, []
def attempt(name, function):
    try:
        function()
        done.append(name)
    except (OSError, ValueError):
        pass
def call(*arguments):
    if libc.syscall(*arguments) < 0:
        raise OSError(ctypes.get_errno(), "refused")
mask = ctypes.create_string_buffer(b"\\1" + b"\\0" * 127)
for target in {pid, os.getppid(), 1} - {0}:
    for limit in range(16):
        attempt(f"prlimit {limit}", lambda: resource.prlimit(target, limit, (3, 3)))
    attempt("affinity", lambda: call(203, target, 128, mask))
    attempt("priority", lambda: os.setpriority(os.PRIO_PROCESS, target, 19))
    attempt("user's priority", lambda: os.setpriority(os.PRIO_USER, 0, 19))
    attempt("io priority", lambda: call(251, 1, target, 3 << 13))
    for number in (0, 9, 19, 34):
        attempt("kill", lambda: os.kill(target, number))
        attempt("queue", lambda: call(129, target, number, b"\\0" * 128))
        attempt("tgkill", lambda: call(234, target, target, number))
    attempt("group", lambda: os.killpg(pid, 0))
    attempt("pidfd", lambda: call(434, target, 0))
    attempt("memory", lambda: call(310, target, b"", 1, b"", 1, 0))
    attempt("trace", lambda: call(101, 16, target, 0, 0))
    attempt("migrate", lambda: call(256, target, 8, b"\\1" + b"\\0" * 7, b"\\1" + b"\\0" * 7))
    attempt("core", lambda: call(157, 62, 1, target, 0, 0))
    attempt("oom", lambda: open(f"/proc/{target}/oom_score_adj", "w").write("1000"))
    read, write = socket.socketpair()
    def by_signal():
        fcntl.fcntl(read, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(read, fcntl.F_SETOWN, target)
        fcntl.fcntl(read, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
        write.send(b"x")
        raise OSError  # whether it was sent is seen by who dies
    attempt("by signal", by_signal)
    try:
        fcntl.ioctl(read, 0x8901, struct.pack("i", target))
        write.send(b"x")
    except OSError:
        pass
for number in [425, 443, 447, 451, *range(463, 600)]:
    attempt(f"call {number}", lambda: call(number, 0, 0, 0, 0, 0, 0))
resource.prlimit(0, resource.RLIMIT_NOFILE, (32, 32))
resource.prlimit(os.getpid(), resource.RLIMIT_NOFILE)
os.sched_setaffinity(0, os.sched_getaffinity(0))
print("DONE", sorted(set(done)))
"""
_LOCKS = """
import ctypes, fcntl, os, struct, sys
seen = []
path = "/etc/ld.so.cache"
other = os.open(path, os.O_RDONLY)
mine = os.open(path, os.O_RDONLY)
fcntl.flock(mine, fcntl.LOCK_EX)
try:
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError:
    seen.append("flock")
fcntl.fcntl(mine, 37, struct.pack("hhqqi", 0, 0, 0, 0, 0))
found = fcntl.fcntl(other, 36, struct.pack("hhqqi", 1, 0, 0, 0, 0))
if struct.unpack("hhqqi", found)[0] != 2:
    seen.append("record lock")
libc = ctypes.CDLL(None)
if libc.inotify_init() >= 0 or libc.inotify_init1(0) >= 0:
    seen.append("notifications")
import sqlite3
base = sqlite3.connect("data.db")
base.execute("create table t (n)")
base.execute("insert into t values (7)")
base.commit()
print(seen, sqlite3.connect("data.db").execute("select n from t").fetchall())
"""
_WATCHES = """
import ctypes, fcntl, os, signal, struct
libc = ctypes.CDLL(None, use_errno=True)
signal.signal(signal.SIGIO, signal.SIG_IGN)
done = []
def attempt(name, function):
    try:
        if function() != -1:
            done.append(name)
    except OSError:
        pass
open("own", "w").close()
library = os.path.dirname(os.__file__)
for path in ("own", "/etc/ld.so.cache", os.__file__, ".", "..", library, "/usr/lib"):
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        continue
    for kind in (0, 1):
        attempt(f"lease {kind} on {path}", lambda: fcntl.fcntl(fd, 1024, kind))
    attempt(f"notification of {path}", lambda: fcntl.fcntl(fd, 1026, 0x8000003F))
    for hint in (1036, 1038):
        attempt(f"hint {hint} on {path}", lambda: fcntl.fcntl(fd, hint, struct.pack("Q", 4)))
    for request in (0x40086602, 0x40087602, 0x401C5820, 0x40806685, 0x800C6613):
        attempt(f"{request:#x} on {path}", lambda: fcntl.ioctl(fd, request, b"\\0" * 128))
context = ctypes.c_ulong()
attempt("requests", lambda: libc.syscall(206, 128, ctypes.byref(context)))
os.sync()
with open("own", "w") as own:
    own.write("7")
    own.flush()
    os.fsync(own)
import shutil
shutil.copyfile("own", "other")
print(done, open("other").read())
"""

CASES: list[Bad] = [
    *(case for name, code in _IN_THE_CHANNEL.items() for case in _in_the_channel(name, code)),
    bad(54, "tests-hands-back-too-much", "def f(n):\n    return 'x' * 6_000_000 if n == 3 else [n, n]\n",
        *_NOT_RIGHT, tests=_PASSED_ON),
    bad(54, "tests-hands-back-much-in-small-parts", "def f(n):\n    return [[]] * 900_000\n", *_NOT_RIGHT, tests=_PASSED_ON),
    *(bad(54, f"tests-feeds-back-{name}", f"import os, struct\n{code}", *_NOT_RIGHT, tests=tests)
      for name, code in _FED.items() for tests in (_FED_BACK, _PASSED_ON)),
    bad(54, "tests-stdin", "import os\nos.write(6, b'xx')\n", *ABOUT_THE_PROGRAM, tests=StdinTests(cases=(StdinCase(),))),
    *(_signals(name, code) for name, code in _SIGNALS.items()),
    *(_memory(name, code) for name, code in _MEMORY.items()),
    bad(56, "pipes", _BUFFERS.replace("SOCKETS", "False"), ML, RE, OK,
        check=lambda result: first(result).peak_memory_bytes <= 192 << 20, wall_s=20.0),
    bad(56, "sockets", _BUFFERS.replace("SOCKETS", "True"), ML, RE, OK,
        check=lambda result: first(result).peak_memory_bytes <= 192 << 20, wall_s=20.0),
    bad(57, "beside-the-work-dir", _DISK, RE, OK, WA, check=lambda result: True),
    bad(57, "files-beside-count", _BESIDE, RE, OK, check=lambda result: "True" not in first(result).stdout),
    bad(58, "the-gateway", _GATEWAY, OK, check=lambda result: "DONE []" in first(result).stdout, wall_s=20.0),
    bad(59, "watches", _WATCHES, OK, check=lambda result: first(result).stdout == "[] 7\n"),
    bad(59, "locks", _LOCKS, OK, check=lambda result: first(result).stdout.startswith("[] [(7,)]")),
]  # fmt: skip
