"""Memory, output and files: rows 2 to 7, 18 to 23, 39 to 41, 47."""

from __future__ import annotations

from services.envgateway.judge.records import Comparison, ComparisonMode
from services.envgateway.sandbox.bare.statuses import RunStatus
from tests.integration.envgateway.cases.model import IR, ML, OK, OL, OUTPUT_CAP, RE, WA, Bad, bad, first

_PER_CHILD = 60 << 20
_FLOOD = "import os\ndata = b'x' * 65536\nfor _ in range(800):\n    "  # 50 MB at most
_ATTEMPTS = """
import os
def attempt(function):
    try:
        function()
        print("done")
    except OSError:
        print("refused")
"""


def _capped(result: object) -> bool:
    case = first(result)  # type: ignore[arg-type]
    return case.truncated


CASES: list[Bad] = [
    bad(2, "memory-bomb", "x = []\nfor _ in range(60): x.append(bytearray(b'1' * (10 << 20)))", ML),
    bad(2, "memory-bomb-that-catches-its-error", "x = []\nfor _ in range(60):\n  try: x.append(bytearray(b'1' * (10 << 20)))\n"
        "  except MemoryError: pass\nprint('survived')", ML),
    bad(2, "memory-error-uncaught", "x = bytearray(1 << 40)", ML),
    bad(3, "memory-bomb-in-children", f"import os, time\nfor _ in range(6):\n  if os.fork() == 0:\n"
        f"    x = bytearray(b'1' * {_PER_CHILD}); time.sleep(2); os._exit(0)\ntime.sleep(2)", ML),
    bad(4, "memory-never-touched", "import mmap\nprivate = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS\n"
        "m = mmap.mmap(-1, 400 << 20, private)\nn = mmap.mmap(-1, 400 << 20, private)\nprint('ok')", OK, expected="ok"),
    bad(5, "endless-stdout", _FLOOD + "os.write(1, data)", OL, check=_capped),
    bad(6, "endless-stderr", _FLOOD + "os.write(2, data)", OL, check=_capped),
    bad(6, "endless-both", _FLOOD + "os.write(1, data); os.write(2, data)", OL, check=_capped),
    bad(7, "tiny-writes", "import os\nfor _ in range(100_000): os.write(1, b'x')", OL, check=_capped),
    bad(7, "output-at-the-cap", f"print('x' * {OUTPUT_CAP - 1})", OK, check=lambda r: not first(r).truncated),
    bad(18, "one-big-file", "open('big', 'wb').write(b'x' * (2 << 20))", RE),
    bad(18, "one-big-sparse-file", "import os\nf = open('big', 'wb')\nf.truncate(1 << 40)", RE),
    bad(19, "many-bytes-in-small-files", "import time\nfor i in range(12):\n  open(f'f{i}', 'wb').write(b'x' * 700_000)\n"
        "time.sleep(0.3)", RE),
    bad(19, "files-without-names", "import os, time\nkept = []\nfor i in range(12):\n  f = open(f'f{i}', 'wb', 0)\n  os.unlink(f'f{i}')\n"
        "  f.write(b'x' * 700_000)\n  kept.append(f)\ntime.sleep(0.5)", RE),
    bad(19, "many-files", "import time\nfor i in range(2000):\n  open(f'f{i}', 'w').close()\ntime.sleep(0.3)", RE),
    bad(19, "many-directories", "import os\nfor i in range(2000): os.mkdir(f'd{i}')", RE),
    bad(19, "deep-tree", "import os\nfor _ in range(10_000):\n  os.mkdir('d'); os.chdir('d')", RE),
    bad(20, "writes-elsewhere", _ATTEMPTS + "for path in ('/tmp/escaped', '/dev/shm/escaped', '/escaped', '/var/tmp/escaped',"
        " '/etc/passwd', PACKAGE_FILE, '/proc/self/oom_score_adj'):\n  attempt(lambda: open(path, 'a').write('x'))", OK,
        expected="refused\n" * 7),
    bad(21, "links-to-host-files", _ATTEMPTS + "attempt(lambda: os.symlink(CANARY_FILE, 'soft'))\n"
        "attempt(lambda: os.link(CANARY_FILE, 'hard'))\nattempt(lambda: print(open('soft').read()))\n"
        "attempt(lambda: os.chmod('soft', 0o777))\nos.symlink('/', 'root')", OK,
        expected="done\nrefused\nrefused\nrefused\n"),
    bad(22, "odd-files", _ATTEMPTS + "import stat\nattempt(lambda: os.mkfifo('fifo'))\n"
        "attempt(lambda: os.mknod('device', 0o600 | stat.S_IFBLK, os.makedev(8, 0)))\nprint('ok')", OK),
    bad(23, "closes-its-work-dir", "import os\nos.makedirs('a/b'); open('a/b/c', 'w'); os.chmod('a/b', 0); os.chmod('a', 0)\n"
        "os.chmod('.', 0)", OK),
    bad(23, "removes-its-work-dir", _ATTEMPTS + "import shutil\nattempt(lambda: shutil.rmtree(os.getcwd()))", OK),
    bad(23, "renames-its-work-dir", _ATTEMPTS + "attempt(lambda: os.rename(os.getcwd(), os.getcwd() + '2'))", OK,
        expected="refused"),
    bad(39, "huge-stdin-unread", "print('ok')", OK, expected="ok", stdin="x" * 50_000_000),
    bad(39, "huge-stdin-in-part", "print(len(input()))", OK, expected="7", stdin="seven!!\n" + "x" * 5_000_000),
    bad(39, "closes-stdin", "import sys, os\nsys.stdin.close()\nprint('ok')", OK, expected="ok", stdin="x" * 1_000_000),
    bad(40, "no-stdin", "import sys; print(repr(sys.stdin.read()))", OK, expected="''"),
    bad(40, "stdin-without-a-last-newline", "print(input(), input())", OK, expected="a b", stdin="a\nb"),
    bad(40, "crlf-in-and-out", "import sys\nsys.stdout.buffer.write(sys.stdin.buffer.read())", OK, expected="a\nb\n", stdin="a\r\nb\r\n"),
    bad(40, "crlf-when-exact", "import sys\nsys.stdout.buffer.write(sys.stdin.buffer.read())", WA, expected="a\nb\n",
        stdin="a\r\nb\r\n", comparison=Comparison(mode=ComparisonMode.EXACT)),
    bad(41, "bytes-that-are-no-text", r"import os; os.write(1, b'\xff\x00\x1b[1m\n')", WA, expected="\ufffd\x00\x1b[1m\n"),
    bad(41, "nul-and-escapes", r"import os; os.write(1, b'\x00\x1b[1m\n')", OK, expected="\x00\x1b[1m\n"),
    bad(41, "byte-order-mark-in-output", "print('\\ufeffok')", WA, expected="ok"),
    bad(41, "byte-order-mark-in-source", "\ufeffprint('ok')", OK, expected="ok"),
    bad(41, "surrogate-in-source", "print('\ud800')", IR),
    bad(41, "surrogate-in-stdin", "print(1)", RunStatus.INVALID_TESTS, stdin="\ud800"),
    bad(41, "surrogate-in-expected", "print(1)", RunStatus.INVALID_TESTS, expected="\ud800"),
    bad(41, "surrogate-in-output", "print('\\ud800')", RE, expected="x"),
    bad(47, "shadows-the-library", "for name in ('json', 'sitecustomize', 'usercustomize'):\n"
        "  open(name + '.py', 'w').write('print(\"poisoned\")')\nimport json\nprint(json.dumps([1]))", OK, expected="[1]"),
    bad(47, "poisons-bytecode", _ATTEMPTS + "import json\ncache = json.__cached__\n"
        "attempt(lambda: open(cache, 'wb').write(b'x'))\nattempt(lambda: os.unlink(cache))", OK, expected="refused\nrefused\n"),
]  # fmt: skip
