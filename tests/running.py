"""Whether a process runs, told by its id."""

from __future__ import annotations

from pathlib import Path


def is_running(pid: int) -> bool:
    """False also for a zombie: an ended process whose parent, perhaps the test's own process, has not reaped the child."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
