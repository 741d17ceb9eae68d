"""What a process takes over from its parent: streams, signals, proxies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping

import pytest

from services.common.telemetry.logs import reach_directly
from tests.waiting import WAIT_S

BEGIN = "import os, subprocess, sys\nfrom services.common.telemetry.logs import settle\n"
OURS = "127.0.0.1,localhost,::1"


def python(
    code: str, variables: Mapping[str, str] | None = None, before: Callable[[], None] | None = None, stdout: int = -1
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-c", BEGIN + code],
        env={**os.environ, **(variables or {})},
        stdout=stdout,
        stderr=subprocess.PIPE,
        preexec_fn=before,
        timeout=WAIT_S,
        check=False,
    )


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (1, 2), (0, 1, 2)])
def test_no_file_gets_the_number_of_a_closed_stream(closed: tuple[int, ...]) -> None:
    def close() -> None:
        for number in closed:
            os.close(number)

    code = (
        "settle()\n"
        "print('out'), sys.stderr.write('err'), sys.stdin.read(0), sys.stderr.isatty()\n"
        "sys.exit(10 if open(os.devnull).fileno() > 2 and subprocess.run(['true']).returncode == 0 else 20)"
    )
    assert python(code, before=close).returncode == 10


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "ascii:strict"])
def test_a_sign_that_the_terminal_lacks_is_a_question_mark(encoding: str) -> None:
    told = python("settle()\nprint('reward \\u2264 1 \\U0001f389 \\udc80')", {"PYTHONIOENCODING": encoding})
    assert (told.returncode, told.stdout) == (0, b"reward ? 1 ? ?\n")


def test_a_process_that_outlives_its_output_goes_on_when_the_reader_left_or_the_disk_is_full() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    full = os.open("/dev/full", os.O_WRONLY)
    code = "settle()\nfor _ in range(3): print('x' * 10_000, flush=True), sys.stderr.write('y')\nsys.exit(10)"
    try:
        assert [python(code, stdout=stdout).returncode for stdout in (writing, full)] == [10, 10]
        short = python(code.replace("settle()", "settle(outlives_output=False)"), stdout=full)
        assert b"No space left on device" in short.stderr
    finally:
        os.close(writing)
        os.close(full)


def test_the_end_of_a_child_is_told_and_signals_arrive_whatever_the_parent_ignored_and_blocked() -> None:
    def ignore() -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))

    code = "settle()\nprint(subprocess.run(['sh', '-c', 'exit 7']).returncode, flush=True)\nos.kill(os.getpid(), 15)"
    told = python(code, before=ignore)
    assert (told.returncode, told.stdout) == (-signal.SIGTERM, b"7\n")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (OURS, OURS)),
        ({"no_proxy": "a.example, b.example"}, (f"a.example,b.example,{OURS}",) * 2),
        ({"NO_PROXY": "a.example"}, (f"a.example,{OURS}",) * 2),
        ({"no_proxy": "a", "NO_PROXY": "b"}, (f"a,{OURS}", f"b,{OURS}")),
        ({"NO_PROXY": "*"}, (None, "*")),
        ({"no_proxy": "localhost"}, ("localhost,127.0.0.1,::1",) * 2),
    ],
)
def test_loopback_is_added_to_the_exemptions_of_the_user(
    given: Mapping[str, str], expected: tuple[str | None, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "")  # so that the test's end restores both
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    reach_directly()
    reach_directly()
    assert (os.environ.get("no_proxy"), os.environ.get("NO_PROXY")) == expected


def test_children_have_neither_the_encoding_of_the_terminal_nor_code_without_docstrings() -> None:
    code = (
        "settle()\nsubprocess.run([sys.executable, '-c', 'import sys; print(sys.stdout.encoding, sys.flags.optimize)'])"
    )
    told = python(code, {"PYTHONIOENCODING": "utf-16", "PYTHONOPTIMIZE": "2", "LC_ALL": "C.UTF-8"})
    assert told.stdout == b"utf-8 0\n", told.stderr
