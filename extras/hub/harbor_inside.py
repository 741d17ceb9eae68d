"""Runs in the sandbox, as the first cell of a task's process: files, commands, and the end of the task.

Sent as text; imports the standard library only. Commands are children of this process with the same user, so the process
is closed to them: they cannot read or change its memory.
"""

from __future__ import annotations

import base64
import ctypes
import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from typing import IO, Any

_PR_SET_DUMPABLE = 4
_REWARD_BYTES = 65536
_WORK = "/box/work"
_libc = ctypes.CDLL(None, use_errno=True)
_state: dict[str, Any] = {}


def begin(directories: list[str], workdir: str, variables: dict[str, str]) -> None:
    """Prepare the writable directories, and see that commands run here at all."""
    if _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_DUMPABLE)")
    for name in directories:
        os.makedirs(f"{_WORK}/{name}", exist_ok=True)
    _state.update(workdir=workdir, env={
        "HOME": "/root", "TMPDIR": "/tmp",
        "LANG": "C.UTF-8", "USER": "root", "SHELL": "/bin/bash", "TERM": "dumb", **variables,
    })  # fmt: skip
    os.makedirs(workdir, exist_ok=True)
    subprocess.run(["/bin/bash", "-c", "true"], check=True, env=_state["env"], cwd=workdir)


def put(packed: str) -> None:
    """Unpack files: an archive in base64, with paths below the root."""
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(packed))) as archive:
        archive.extraction_filter = staticmethod(lambda member, path: member)  # the task's own: links may lead anywhere
        archive.extractall("/")


def command(text: str, limit_s: float) -> None:
    """Run a command of the agent; the last line tells how it ended, if not well."""
    code = _run(["/bin/bash", "-c", text], _state["env"], limit_s)
    if code is None:
        _tell(f"(the command was stopped after {limit_s:g} s)")
    elif code:
        _tell(f"(exit code {code})")


def verify(limit_s: float, tests: str, logs: str, text: str, variables: dict[str, str]) -> None:
    """End everything the agent has left running, bring the tests, and run them. Prints the outcome as JSON: whether test.sh
    ended, and its reward files in base64 (null for one that is not there).

    ``tests`` and ``logs`` are emptied first: a reward, or a test, of the agent's own is gone.
    """
    _end_others()
    for name in (tests, logs):
        _remove(f"{_WORK}{name}")
        os.makedirs(f"{_WORK}{name}")
    os.makedirs(f"{logs}/verifier")
    os.makedirs(_state["workdir"], exist_ok=True)
    put(text)
    with open(f"{logs}/verifier/test-stdout.txt", "wb") as said:  # in a file: a turn that prints too much is stopped
        code = _run(["/bin/bash", f"{tests}/test.sh"], {**_state["env"], **variables}, limit_s, said)
    _end_others()
    files = {name: _read(f"{logs}/verifier/{name}") for name in ("reward.json", "reward.txt")}
    _tell(json.dumps({"ended": code is not None, **files}))


def _tell(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _run(arguments: list[str], env: dict[str, str], limit_s: float, said: IO[bytes] | None = None) -> int | None:
    """The exit code; None for a command that was stopped."""
    try:
        process = subprocess.Popen(
            arguments,
            env=env,
            cwd=_state["workdir"],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:  # of the command: it removed the directory, or left no process free
        _tell(f"(the command could not be started: {error.strerror})")
        return error.errno or errno.EIO
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:  # also where the cell is interrupted
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()


def _end_others() -> None:
    """Kill all other processes of this user in the sandbox; the kernel leaves out this one."""
    for _ in range(100):
        try:
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            return
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
        time.sleep(0.02)
    raise RuntimeError("processes of the agent cannot be ended")


def _remove(path: str) -> None:
    if os.path.islink(path) or os.path.isfile(path):
        os.unlink(path)
    elif os.path.isdir(path):
        for top, _, _ in os.walk(path):
            os.chmod(top, 0o700)
        shutil.rmtree(path)


def _read(path: str) -> str | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(fd, "rb") as file:
        return base64.b64encode(file.read(_REWARD_BYTES)).decode()
