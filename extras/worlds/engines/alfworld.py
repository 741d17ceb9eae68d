"""The engine's process: ``python -m extras.worlds.engines.alfworld descriptor memory_bytes``.

    open {"path": game.tw-pddl}  ->  {"feedback", "admissible"}
    step "go to shelf 1"         ->  {"feedback", "admissible", "won", "done"}

Engines are used again: each has a copy of the planner's library (34 MB) that can be neither shared nor unloaded.
"""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

from extras.worlds.engines.process import Answer, RefusedError, serve

_REMEMBERED_GAMES = 16


def main() -> None:
    descriptor, memory_bytes = int(sys.argv[1]), int(sys.argv[2])  # read first: importing alfworld overwrites them
    serve(descriptor, memory_bytes, _Houses(_import_engine()).load)


def _import_engine() -> Callable[[], Any]:
    # alfworld imports torch for agents of its own, unused here; the real torch takes seconds and gigabytes.
    sys.modules.setdefault("torch", types.ModuleType("torch"))
    import fast_downward
    import textworld
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
    from textworld.envs.pddl import PddlEnv

    # To start one game the engine translates its problem twice in two ways, 0.1 to 0.3 s each, and a group of episodes
    # plays the same game. The output is only read.
    fast_downward.pddl2sas = functools.lru_cache(maxsize=2 * _REMEMBERED_GAMES)(fast_downward.pddl2sas)
    infos = textworld.EnvInfos(feedback=True, won=True, admissible_commands=True)
    return lambda: AlfredDemangler(PddlEnv(infos))


class _Houses:
    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._spare: list[Any] = []

    def load(self, settings: Mapping[str, Any]) -> _House:
        path = settings["path"]
        if not os.path.isfile(path):
            raise RefusedError(f"there is no game {path}")
        engine = self._spare.pop() if self._spare else self._make()
        try:
            engine.load(path)
        except BaseException:
            self._spare.append(engine)  # the next load begins anew
            raise
        return _House(engine, self._spare)


class _House:
    def __init__(self, engine: Any, spare: list[Any]) -> None:
        self._engine = engine
        self._spare = spare

    def start(self) -> Answer:
        state = self._engine.reset()
        return {"feedback": state.feedback.strip(), "admissible": state["admissible_commands"]}

    def step(self, command: str) -> Answer:
        state, _, done = self._engine.step(command)
        return {
            "feedback": state.feedback.strip(),
            "admissible": state["admissible_commands"],
            "won": bool(state["won"]),
            "done": bool(done),
        }

    def close(self) -> None:
        self._spare.append(self._engine)


if __name__ == "__main__":
    main()
