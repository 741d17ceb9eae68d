"""The engine's process: ``python -m extras.worlds.engines.textworld descriptor memory_bytes``.

open {"path": game.z8, "seed"}  ->  {"feedback", "admissible", "objective", "max_score"}
step "open fridge"              ->  {"feedback", "admissible", "score", "won", "done"}
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from extras.worlds.engines.process import Answer, RefusedError, serve


def main() -> None:
    descriptor, memory_bytes = int(sys.argv[1]), int(sys.argv[2])
    import textworld

    infos = textworld.EnvInfos(
        feedback=True, won=True, lost=True, admissible_commands=True, score=True, max_score=True, objective=True
    )

    def load(settings: Mapping[str, Any]) -> _TextGame:
        path = settings["path"]
        if not os.path.isfile(path):
            raise RefusedError(f"there is no game {path}")
        environment = textworld.start(path, infos)
        environment.seed(settings["seed"])
        return _TextGame(environment)

    serve(descriptor, memory_bytes, load)


class _TextGame:
    def __init__(self, environment: Any) -> None:
        self._environment = environment

    def start(self) -> Answer:
        state = self._environment.reset()
        return {
            "feedback": state.feedback,
            "admissible": _admissible(state),
            "objective": state.get("objective") or "",
            "max_score": float(state.get("max_score") or 0),
        }

    def step(self, command: str) -> Answer:
        state, _, done = self._environment.step(command)
        return {
            "feedback": state.feedback,
            "admissible": _admissible(state),
            "score": float(state.get("score") or 0),
            "won": bool(state.get("won")),
            "done": bool(done),
        }

    def close(self) -> None:
        self._environment.close()


def _admissible(state: Any) -> list[str]:
    """None are listed for a game without its ``.json``."""
    return list(state.get("admissible_commands") or ())


if __name__ == "__main__":
    main()
