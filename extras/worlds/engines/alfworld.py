"""ALFWorld's process: ``python -m extras.worlds.engines.alfworld descriptor memory_bytes``. Games are opened by ``{"path"}``."""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

from extras.worlds.engines.process import LoadedGame, RefusedError, serve

_REMEMBERED_GAMES = 16


def main() -> None:
    descriptor, memory_bytes = int(sys.argv[1]), int(sys.argv[2])  # read first: importing alfworld overwrites them
    make = _import_engine()
    spare: list[
        Any
    ] = []  # used again: each has a copy of the planner's library (34 MB) that can be neither shared nor unloaded

    def load(settings: Mapping[str, Any]) -> LoadedGame:
        path = settings["path"]
        if not os.path.isfile(path):
            raise RefusedError(f"there is no game {path}")
        engine = spare.pop() if spare else make()
        try:
            engine.load(path)
        except BaseException:
            spare.append(engine)  # the next load begins anew
            raise
        return LoadedGame(engine, lambda: spare.append(engine))

    serve(descriptor, memory_bytes, load)


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


if __name__ == "__main__":
    main()
