"""Requirements of a benchmark beyond Python: each function returns None, or the missing part with the remedy.

The answers are reasons for ``left_out`` (``_report.py``). Shared by the scripts of this folder.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")


def why_no_rows(data: Path | None, paths: Iterable[str]) -> str | None:
    """Files of rows below the folder that --data or ROLLMILL_DATA_ROOT names."""
    if data is None:
        return "no rows: name their folder with --data or ROLLMILL_DATA_ROOT"
    missing = [path for path in paths if not (data / path).is_file()]
    return f"no rows: {data} has no {', '.join(missing)} (--data or ROLLMILL_DATA_ROOT)" if missing else None


def why_not(name: str) -> str | None:
    """One of the needs of tests (``tests/needs.py``), such as "redis-server": reason and remedy."""
    from tests.needs import NEEDS

    need = NEEDS[name]
    reason = need.missing()
    return f"{reason} ({need.add})" if reason else None


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
