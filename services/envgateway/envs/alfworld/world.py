"""State shared by episodes of ALFWorld: the list of games and the engine's processes."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from pathlib import Path

from services.common.config.processes.environments import AlfworldConfig
from services.envgateway.envs.alfworld.episode import AlfworldEpisode
from services.envgateway.envs.alfworld.games import GameList, list_games
from services.envgateway.envs.engines.pool import EnginePool

_MODULE = "services.envgateway.envs.alfworld.engine"


class AlfworldWorld:
    """An indexed world (see ``envs/base.py``). Games are listed, and the engine is started, with the first episode."""

    def __init__(self, config: AlfworldConfig, data: Path) -> None:
        self._config = config
        self._data = data
        environment = {"ALFWORLD_DATA": str(data.absolute())}  # importing alfworld makes the folder that this names
        self.pool = EnginePool("alfworld", _MODULE, config.engine, environment)

    @functools.cached_property
    def games(self) -> GameList:
        """Raises ``ConfigError``."""
        return list_games(self._data, self._config)

    async def indices(self) -> Sequence[int]:
        return range(len((await asyncio.to_thread(lambda: self.games)).names))

    @property
    def max_turns(self) -> int:
        return self._config.max_turns

    @property
    def gauges(self) -> dict[str, float]:
        return self.pool.gauges

    def build(self) -> AlfworldEpisode:
        return AlfworldEpisode(self.pool, self._data, lambda: self.games, self._config.max_turns)

    async def close(self) -> None:
        await self.pool.close()
