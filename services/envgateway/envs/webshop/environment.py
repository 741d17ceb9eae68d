"""One episode of ``webshop``: a visit, talked about, within so many turns.

A task's row names its goal: ``{"index": 7}``, or a whole goal in WebShop's form under ``goal``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from services.common.config.base import Section
from services.common.config.processes.environments import WebshopConfig, WebshopPage
from services.common.errors import CapacityError, ConfigError, InvalidRequestError
from services.envgateway.envs.base import EndStatus, Observation, StepResult
from services.envgateway.envs.settings import settings_of
from services.envgateway.envs.webshop.catalogue import find_files
from services.envgateway.envs.webshop.dialogue import OPENING, Style, action_of, admissible, shown
from services.envgateway.envs.webshop.goals import Goal, goal_of
from services.envgateway.envs.webshop.reward import Tagger, tagger_of
from services.envgateway.envs.webshop.shop import Shop, open_shop
from services.envgateway.envs.webshop.visit import Visit
from services.envgateway.threads import THREADS


class WebshopSettings(Section):
    style: Style = "agentbench"
    """Form of the messages: AgentBench's dialogue with rules and an example, or pages and actions alone (`bare`)."""
    observation: WebshopPage | None = None
    """How a page is shown; left out, `envgateway.webshop.observation`."""
    max_turns: int | None = Field(default=None, ge=1)
    """Turns of the episode; left out, `envgateway.webshop.max_turns`."""


class WebshopEnvironment:
    """WebShop as an environment. ``reset`` waits for the shop; ``step`` is a plain function, so searches run in a
    thread."""

    def __init__(self, owner: WebshopWorld, config: WebshopConfig) -> None:
        self._owner = owner
        self._max_turns = config.max_turns
        self._style: Style = "agentbench"
        self._page: WebshopPage = config.observation
        self._visit: Visit | None = None
        self._turns = 0

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        settings = settings_of(task, WebshopSettings)
        goal, session = _goal_of(task, await self._owner.shop())
        self._visit = Visit(await self._owner.shop(), goal, session)
        self._max_turns = settings.max_turns or self._max_turns
        self._style = settings.style
        self._page = settings.observation or self._page
        text = shown(self._visit, self._style, self._page)
        if self._style == "bare":
            return Observation(text=text, admissible_actions=admissible(self._visit))
        messages = (*OPENING, {"role": "user", "content": text})
        return Observation(
            text="\n\n".join(message["content"] for message in messages),
            admissible_actions=admissible(self._visit),
            messages=messages,
        )

    def step(self, action: str) -> StepResult:
        assert self._visit is not None, "step before reset"
        chosen = action_of(action, self._style)
        self._turns += 1
        if chosen is None:
            return StepResult(done=True, status=EndStatus.VALIDATION_FAILED, metrics={"unparsed_actions": 1.0})
        self._visit.act(chosen)
        text = shown(self._visit, self._style, self._page)
        if self._visit.purchase is not None:
            purchase = self._visit.purchase
            return StepResult(
                observation=text,
                reward=purchase.reward,
                done=True,
                metrics=purchase.metrics(),
                status=EndStatus.COMPLETED,
            )
        at_end = self._turns >= self._max_turns
        return StepResult(
            observation=text,
            done=at_end,
            admissible_actions=admissible(self._visit),
            status=EndStatus.TURN_LIMIT if at_end else "",
        )

    def close(self) -> None:
        self._visit = None


def _goal_of(task: Mapping[str, Any], shop: Shop) -> tuple[Goal, str]:
    """The goal, and the name of the session in URLs."""
    if isinstance(task.get("goal"), Mapping):
        return goal_of(task["goal"]), str(task.get("index", "own"))
    index = task.get("index")
    if not isinstance(index, int) or isinstance(index, bool):
        raise InvalidRequestError("the task names no goal: it needs `index`, a whole number, or `goal`")
    if not 0 <= index < len(shop.goals):
        raise InvalidRequestError(
            f"the shop holds {len(shop.goals)} goals, and indices count from 0; the task asks for index {index}"
        )
    return shop.goals[index], str(index)


_OPEN_TIMEOUT_S = 20.0
_COME_BACK_S = 5.0


class WebshopWorld:
    """One shop for all episodes, opened by the first."""

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
