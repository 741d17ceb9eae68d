"""How a process leaves: its exit code and its words are those of an ordinary end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import pytest

from services.common.system.child import module_command
from services.common.telemetry.logs import reach_directly
from tests.running import is_running
from tests.waiting import PROCESS_S, WAIT_S, wait_until

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


# --- Any program ends with its parent, after every kind of death

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


# --- Processes of a run may open as many files as the hard limit allows, whatever the shell begins with

PROBE = "import resource\nprint(*resource.getrlimit(resource.RLIMIT_NOFILE))\n"
CLI = """\
import resource, sys
from services.cli.__main__ import main
sys.argv = ["rollmill", "--version"]
try:
    main()
except SystemExit:
    print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize("kind", ["service", "launcher"])
def test_the_soft_limit_of_open_files_is_raised_to_the_hard_one(tmp_path: Path, kind: str) -> None:
    (tmp_path / "probe.py").write_text(PROBE)
    command = list(module_command("probe")) if kind == "service" else [sys.executable, "-c", CLI]
    limited = ["/bin/bash", "-c", 'ulimit -Sn 128 && ulimit -Hn 512 && exec "$@"', "bash", *command]
    done = subprocess.run(
        limited,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "512 512"


# --- What a process takes over from its parent: streams, signals, proxies

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
