"""Checks at the start that all ranks see one directory of checkpoints.

Each rank writes its own part of a checkpoint. On several nodes this needs a shared file system: otherwise every node would
hold a part, and no checkpoint could be restored.
"""

from __future__ import annotations

import socket
import time
import uuid
from pathlib import Path

from services.common.errors import ConfigError
from services.trainer.ranks.sharding import HostGroup, Ranks

APPEAR_S = 5.0  # network file systems show a new file late
POLL_S = 0.1
_MARK = ".seen-by-all-"


def require_shared(directory: Path, ranks: Ranks, appear_s: float = APPEAR_S) -> None:
    """Raise ``ConfigError`` on every rank when a rank does not see the first rank's file. A collective."""
    if ranks.world_size == 1:
        return
    hosts = HostGroup(ranks)
    mark = directory / f"{_MARK}{uuid.uuid4().hex}"

    def write() -> str:
        if ranks.is_first:
            directory.mkdir(parents=True, exist_ok=True)
            mark.touch()
        return mark.name

    name = hosts.agree("preparing the directory of checkpoints", write, ConfigError)[0]

    def look() -> str:
        deadline = time.monotonic() + appear_s
        while not (directory / name).exists():
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"on {socket.gethostname()}, {directory} is not the directory that the first rank writes checkpoints to: "
                    "a trainer on several nodes needs one that all of them see; name it with --run-dir (RUN_DIR)"
                )
            time.sleep(POLL_S)
        return ""

    try:
        hosts.agree("looking for the directory of checkpoints", look, ConfigError)
    finally:
        if ranks.is_first:
            mark.unlink(missing_ok=True)
