"""Compiles a C file into a shared library for this machine's CPU, once, and keeps it in the user's cache.

The key of the cache holds all that the library depends on: source, flags, compiler and CPU. So a home directory that several
machines share is safe. Only a folder that the user alone can write is read from: a library runs as the user.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import structlog

log = structlog.get_logger(__name__)

# Errors of mathematical functions are not asked for, so the compiler may vectorise; NaN and infinity keep their meaning.
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared")
_TIMEOUT_S = 120.0


class CompileError(Exception):
    """There is no library; the message says why."""


@cache
def load_library(source: Path) -> ctypes.CDLL | None:
    """The library of a C file; None, with a warning in the log, where it cannot be compiled."""
    try:
        return ctypes.CDLL(str(_compiled(source)))
    except (CompileError, OSError) as error:
        log.warning(
            "engine.not_compiled",
            reason=str(error),
            consequence="small models decode with torch, at 1.6 to 11 times the CPU time per step",
            action="install a C compiler (Debian: apt-get install gcc libc6-dev), or name one in the variable CC",
        )
        return None


def _compiled(source: Path) -> Path:
    compiler = shutil.which(os.environ.get("CC") or "cc")
    if compiler is None:
        raise CompileError(f"there is no C compiler {os.environ.get('CC') or 'cc'!r}")
    key = hashlib.sha256(source.read_bytes())
    key.update(repr((_FLAGS, compiler, os.stat(compiler).st_mtime_ns, platform.machine(), _cpu())).encode())
    folder = _folder()
    path = folder / f"{source.stem}-{key.hexdigest()[:32]}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder) as own:  # another process may compile the same
            made = Path(own) / path.name
            _run([compiler, *_FLAGS, str(source), "-o", str(made), "-lm"])
            os.replace(made, path)
    return path


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.CalledProcessError as error:
        raise CompileError(f"{' '.join(command)} failed: {error.stderr[-1000:]}") from error
    except subprocess.TimeoutExpired as error:
        raise CompileError(f"{' '.join(command)} did not end within {_TIMEOUT_S:.0f} s") from error


def _folder() -> Path:
    """The user's cache of compiled code; a temporary folder where there is none that only the user can write."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(home) / "rollmill" / "native"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        if (
            found.st_uid == os.geteuid()
            and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            and os.access(folder, os.W_OK)
        ):
            return folder
    except OSError:  # a home that does not exist or is read-only
        pass
    return Path(tempfile.mkdtemp(prefix="rollmill-native-"))


def _cpu() -> str:
    """What this CPU can do, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
