"""An engine of the pool that counts, stalls, crashes and raises on command."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from extras.worlds.engines.process import Answer, RefusedError, serve


class Counter:
    def __init__(self, settings: Mapping[str, Any]) -> None:
        if settings.get("absent"):
            raise RefusedError("there is no such game")
        self._total = 0

    def start(self) -> Answer:
        return {"pid": os.getpid()}

    def step(self, command: str) -> Answer:
        match command.split():
            case ["add", amount]:
                self._total += int(amount)
            case ["sleep", seconds]:
                time.sleep(float(seconds))
            case ["child"]:
                return {"child": os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "60")}
            case ["crash"]:
                os._exit(3)
            case ["raise"]:
                raise ValueError("as asked")
            case ["eat"]:
                bytearray(8 << 30)
        return {"total": self._total}

    def close(self) -> None:
        self._total = -1


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]), Counter)
