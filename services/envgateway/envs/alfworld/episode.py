"""One episode of ALFWorld: messages to the policy, effects of its replies, and how the episode ends.

- A reply without an action costs its turn and changes nothing.
- An impossible action is replaced by the most similar possible action.
- Three equal replies in a row (of those that held an action, from the fourth on) end the episode as an invalid action.
- Only a won game is worth 1, however the episode ends.
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import Field

from services.common.config.base import Section
from services.common.config.processes.environments import AlfworldConfig
from services.envgateway.envs.alfworld import prompts
from services.envgateway.envs.alfworld.actions import choose
from services.envgateway.envs.alfworld.games import GameList, game_of, list_games
from services.envgateway.envs.base import EndStatus, Observation, StepResult
from services.envgateway.envs.engines.pool import EnginePool, Game
from services.envgateway.envs.replies import MALFORMED, offer, read_action, without_offer
from services.envgateway.envs.settings import settings_of

_SAME_REPLIES = 3


class AlfworldSettings(Section):
    max_turns: int | None = Field(default=None, ge=1)
    """Turns of this episode; left out, `envgateway.alfworld.max_turns`."""


class AlfworldEpisode:
    def __init__(self, pool: EnginePool, data: Path, games: Callable[[], GameList], max_turns: int) -> None:
        """``games`` may block at its first call: the call reads a folder."""
        self._pool = pool
        self._data = data
        self._games = games
        self._max_turns = max_turns
        self._game: Game | None = None
        self._admissible: Sequence[str] = ()
        self._replies: deque[str] = deque(maxlen=_SAME_REPLIES)  # the last that held an action
        self._taken = 0  # all that held one
        self._turns = 0
        self._malformed = 0
        self._replaced = 0

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        """Reset. The row names the game; the seed is not used."""
        self._max_turns = settings_of(task, AlfworldSettings).max_turns or self._max_turns
        name = game_of(task, await asyncio.to_thread(self._games), self._data)
        self._game, answer = await self._pool.open({"path": str((self._data / name).absolute())})
        self._admissible = answer["admissible"]
        room = "\n".join(answer["feedback"].split("\n\n")[1:])  # without the engine's welcome
        messages = prompts.opening(_folder(name), room, self._admissible)
        return Observation(
            text=prompts.as_text(messages),
            admissible_actions=self._admissible,
            messages=messages,
            remembered=without_offer(messages[-1]["content"]),
        )

    async def step(self, action: str) -> StepResult:
        assert self._game is not None, "stepped before reset"
        command = read_action(action)
        if command is None:
            self._turns += 1
            self._malformed += 1
            return self._result(MALFORMED + offer(self._admissible))
        chosen = choose(command, self._admissible)
        answer = await self._game.step(chosen)
        self._turns += 1
        self._replaced += chosen != command
        self._replies.append(action)
        self._taken += 1
        self._admissible = answer["admissible"]
        text = _heard(answer["feedback"]) + offer(self._admissible)
        if self._taken > _SAME_REPLIES and len(set(self._replies)) == 1:
            return self._result(text, EndStatus.INVALID_ACTION)
        if answer["done"]:
            return self._result(text, EndStatus.COMPLETED, won=answer["won"])
        return self._result(text)

    async def close(self) -> None:
        if self._game is not None:
            self._game.close()

    def _result(self, text: str, status: EndStatus | None = None, won: bool = False) -> StepResult:
        if status is None and self._turns >= self._max_turns:
            status = EndStatus.TURN_LIMIT
        return StepResult(
            observation=text,
            reward=float(won),
            done=status is not None,
            admissible_actions=self._admissible,
            metrics={
                "won": float(won),
                "malformed_replies": float(self._malformed),
                "replaced_actions": float(self._replaced),
            },
            status=status or "",
            remembered=without_offer(text),
        )


def _folder(game: str) -> str:
    """The folder that is named for the task: two above the file."""
    parts = PurePosixPath(game).parts
    return parts[-3] if len(parts) >= 3 else ""


def _heard(feedback: str) -> str:
    """The text without numbers of places (``You arrive at loc 7.``), which tell a policy no fact."""
    return feedback.split(". ", 1)[-1] if feedback.startswith("You arrive at loc ") else feedback


_MODULE = "services.envgateway.envs.alfworld.engine"


class AlfworldWorld:
    """State shared by episodes: an indexed world (see ``envs/base.py``). Games are listed, and the engine is started, with the first episode."""

    def __init__(self, config: AlfworldConfig, data: Path) -> None:
        self._config = config
        self.max_turns = config.max_turns
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
    def gauges(self) -> dict[str, float]:
        return self.pool.gauges

    def build(self) -> AlfworldEpisode:
        return AlfworldEpisode(self.pool, self._data, lambda: self.games, self.max_turns)

    async def close(self) -> None:
        await self.pool.close()
