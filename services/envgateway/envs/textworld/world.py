"""State shared by episodes of TextWorld: the engine's processes and the games that were made."""

from __future__ import annotations

from services.common.config.processes.environments import TextworldConfig
from services.envgateway.envs.engines.pool import EnginePool
from services.envgateway.envs.textworld.episode import TextworldEpisode
from services.envgateway.envs.textworld.maker import GameMaker

_MODULE = "services.envgateway.envs.textworld.engine"


class TextworldWorld:
    """A world (see ``envs/base.py``). No process runs before the first episode."""

    def __init__(self, config: TextworldConfig) -> None:
        self._config = config
        self._maker = GameMaker(config.cache, config.make_timeout_s)
        self.pool = EnginePool("textworld", _MODULE, config.engine, {})

    @property
    def max_turns(self) -> int:
        return self._config.max_turns

    @property
    def gauges(self) -> dict[str, float]:
        return self.pool.gauges

    def build(self) -> TextworldEpisode:
        return TextworldEpisode(self.pool, self._maker, self._config.games, self._config.max_turns)

    async def close(self) -> None:
        await self.pool.close()
