"""One episode of a TextWorld game. Its rewards are the shares of the game's score, 1 in all; 1 for a win without a score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from services.envgateway.envs.base import EndStatus, Observation, StepResult
from services.envgateway.envs.engines.pool import EnginePool, Game
from services.envgateway.envs.replies import MALFORMED, offer, read_action, without_offer
from services.envgateway.envs.settings import settings_of
from services.envgateway.envs.textworld import prompts
from services.envgateway.envs.textworld.commands import REFUSED, is_of_the_game
from services.envgateway.envs.textworld.games import TextworldSettings, game_of, index_of
from services.envgateway.envs.textworld.maker import GameMaker


class TextworldEpisode:
    def __init__(self, pool: EnginePool, maker: GameMaker, folder: Path | None, max_turns: int) -> None:
        """``folder`` holds the games; without one they are made."""
        self._pool = pool
        self._maker = maker
        self._folder = folder
        self._max_turns = max_turns
        self._game: Game | None = None
        self._admissible: Sequence[str] = ()
        self._max_score = 0.0
        self._score = 0.0
        self._turns = 0
        self._malformed = 0

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        """The game comes from the row alone, so that all episodes of a task play the same; ``seed`` is its chance."""
        settings = settings_of(task, TextworldSettings)
        self._max_turns = settings.max_turns or self._max_turns
        if self._folder is None:
            path = await self._maker.make(settings.make, index_of(task))
        else:
            path = game_of(task, self._folder)
        self._game, answer = await self._pool.open({"path": str(path.absolute()), "seed": seed % 2**31})
        self._admissible = answer["admissible"]
        self._max_score = answer["max_score"]
        text = prompts.opening(answer["feedback"], answer["objective"], self._admissible)
        return Observation(text=text, admissible_actions=self._admissible, remembered=without_offer(text))

    async def step(self, action: str) -> StepResult:
        assert self._game is not None, "stepped before reset"
        command = read_action(action)
        if command is None or not is_of_the_game(command):
            self._turns += 1
            self._malformed += 1
            return self._result((MALFORMED if command is None else REFUSED) + offer(self._admissible))
        answer = await self._game.step(command)
        self._turns += 1
        self._admissible = answer["admissible"]
        text = prompts.tidy(answer["feedback"]) + offer(self._admissible)
        return self._result(text, self._earned(answer), done=answer["done"], won=answer["won"])

    async def close(self) -> None:
        if self._game is not None:
            self._game.close()

    def _earned(self, answer: Mapping[str, Any]) -> float:
        if self._max_score <= 0:
            return float(answer["won"])
        gained, self._score = answer["score"] - self._score, answer["score"]
        return float(gained / self._max_score)

    def _result(self, text: str, reward: float = 0.0, done: bool = False, won: bool = False) -> StepResult:
        status = ""
        if done:
            status = EndStatus.COMPLETED
        elif self._turns >= self._max_turns:
            status = EndStatus.TURN_LIMIT
        return StepResult(
            observation=text,
            reward=reward,
            done=bool(status),
            admissible_actions=self._admissible,
            metrics={"won": float(won), "malformed_replies": float(self._malformed)},
            status=status,
            remembered=without_offer(text),
        )
