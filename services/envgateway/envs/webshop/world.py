"""The world ``webshop``: one shop for all episodes, opened by the first."""

from __future__ import annotations

import asyncio

from services.common.config.processes.environments import WebshopConfig
from services.common.errors import CapacityError, ConfigError
from services.envgateway.envs.webshop.catalogue import find_files
from services.envgateway.envs.webshop.environment import WebshopEnvironment
from services.envgateway.envs.webshop.nouns import Tagger, tagger_of
from services.envgateway.envs.webshop.shop import Shop, open_shop
from services.envgateway.threads import THREADS

_OPEN_TIMEOUT_S = 20.0
_COME_BACK_S = 5.0


class WebshopWorld:
    def __init__(self, config: WebshopConfig, tagger: Tagger | None = None) -> None:
        """``tagger`` instead of the config's. Raises ``ConfigError`` when a file is not there."""
        if config.data is None:
            raise ConfigError("envgateway.webshop.data names no folder")
        if config.goals is not None and not config.goals.is_file():
            raise ConfigError(f"envgateway.webshop.goals: there is no file {config.goals.absolute()}")
        self._files = find_files(config.data)
        self._config = config
        self.max_turns = config.max_turns
        self._tagger = tagger or tagger_of(config)
        self._opening: asyncio.Task[Shop] | None = None

    def build(self) -> WebshopEnvironment:
        return WebshopEnvironment(self, self._config)

    async def indices(self) -> range:
        return range(len((await self.shop()).goals))

    async def shop(self) -> Shop:
        """Opened once, in a thread that outlives a caller that gives up. A failure is raised, and the next call tries
        again.

        Raises ``CapacityError`` while a large catalogue is still being read: come back.
        """
        if self._opening is None or (self._opening.done() and not _succeeded(self._opening)):
            config = self._config
            opening = THREADS.run(open_shop, self._files, config.goals, config.num_products, config.seed, self._tagger)
            self._opening = asyncio.create_task(opening, name="open the shop")
        opened, _ = await asyncio.wait([self._opening], timeout=_OPEN_TIMEOUT_S)
        if not opened:
            raise CapacityError("the shop is still being opened", retry_after_s=_COME_BACK_S)
        return self._opening.result()

    async def close(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait([self._opening])
            _succeeded(self._opening)
            self._opening = None


def _succeeded(opening: asyncio.Task[Shop]) -> bool:
    return not opening.cancelled() and opening.exception() is None
