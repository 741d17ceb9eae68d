"""Reading and reaching data outside of the program: rows 14 to 17."""

from __future__ import annotations

from tests.integration.envgateway.cases.model import OK, Bad, bad

_ATTEMPTS = """
import os, socket
def attempt(name, function):
    try:
        print(name, "reached", function())
    except OSError:
        print(name, "refused")
"""
_FILES = (
    "/proc/JUDGE_PID/environ", "/proc/JUDGE_PID/cmdline", "/proc/JUDGE_PID/mem", "/proc/JUDGE_PID/maps", "/proc/1/environ",
    "/proc/1/cmdline", "/proc/JUDGE_PID/fd/0", "/etc/shadow", "/root/.bash_history", "/proc/kallsyms", "/dev/mem",
)  # fmt: skip
_NETWORK = (
    "socket.create_connection(('127.0.0.1', TCP_PORT), timeout=1)",
    "socket.create_connection(('169.254.169.254', 80), timeout=1)",
    "socket.create_connection(('::1', TCP_PORT), timeout=1)",
)
_DATAGRAMS = (
    "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', UDP_PORT))",
    "socket.getaddrinfo('localhost.localdomain', 80)",
    "socket.socket(socket.AF_UNIX).connect('\\0rollmill-slot-user-61000')",
    "socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)",
    "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
)
_SERVERS = (
    "socket.create_server(('127.0.0.1', 0))",
    "socket.create_server(('0.0.0.0', 8000))",
    "socket.socket(socket.AF_UNIX).bind('socket')",
)


def _all_refused(attempts: tuple[str, ...]) -> tuple[str, str]:
    code = _ATTEMPTS + "".join(f"attempt({i}, lambda: {text})\n" for i, text in enumerate(attempts))
    return code, "".join(f"{i} refused\n" for i in range(len(attempts)))


_READ, _READ_EXPECTED = _all_refused(
    (*(f"open({path!r}, 'rb').read(100)" for path in _FILES), "open(CANARY_FILE).read()")
)
_TCP, _TCP_EXPECTED = _all_refused(_NETWORK)
_UDP, _UDP_EXPECTED = _all_refused(_DATAGRAMS)
_BIND, _BIND_EXPECTED = _all_refused(_SERVERS)

# Whatever can be found from inside is printed; the canary must not be in it.
_EVERYTHING = """
import gc, os, sys
print(dict(os.environ), sys.argv, sys.path)
try: pids = os.listdir("/proc")
except OSError: pids = [1, os.getppid(), JUDGE_PID]
for pid in pids:
    for name in ("environ", "cmdline"):
        try: print(open(f"/proc/{pid}/{name}", "rb").read()[:500])
        except OSError: pass
print([o for o in gc.get_objects() if isinstance(o, (dict, list)) and "planted" in str(o)[:10000]][:3])
for fd in range(256):
    try: print(fd, os.readlink(f"/proc/self/fd/{fd}"), os.pread(fd, 100, 0))
    except OSError: pass
"""

_TO_OTHERS = """
import asyncio, socket
done = []
for kind in (socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK):
    for to in ("\\0rollmill-JUDGE_PID", CANARY_FILE + "-socket"):
        try:
            one, other = socket.socketpair(socket.AF_UNIX, kind)
            one.sendto(b"x", to)
            done.append((kind, to))
        except OSError:
            pass
        try:
            one.sendmsg([b"x"], [], 0, to)
            done.append((kind, to))
        except (OSError, NameError):
            pass
asyncio.run(asyncio.sleep(0))
for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
    one, other = socket.socketpair(socket.AF_UNIX, kind)
    one.send(b"x")
    assert other.recv(9) == b"x"
print(done)
"""

CASES: list[Bad] = [
    bad(14, "reads-others-files", _READ, OK, expected=_READ_EXPECTED),
    bad(14, "prints-all-it-finds", _EVERYTHING, OK),
    bad(15, "connects", _TCP, OK, expected=_TCP_EXPECTED),
    bad(16, "datagrams-and-raw-sockets", _UDP, OK, expected=_UDP_EXPECTED),
    bad(16, "datagrams-to-sockets-of-the-machine", _TO_OTHERS, OK, expected="[]"),
    bad(17, "serves", _BIND, OK, expected=_BIND_EXPECTED),
]
