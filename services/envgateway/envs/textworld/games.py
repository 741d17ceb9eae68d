"""Finds the game that a task's row asks for: a file of a folder, or a game to be made."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from services.common.config.base import Section
from services.common.errors import ConfigError, InvalidRequestError

_GAME_FILE = re.compile(r".*\.z[1-8]")


class CookingGame(Section):
    """Find a recipe's ingredients, prepare them, eat the meal."""

    kind: Literal["cooking"]
    recipe: int = Field(default=1, ge=1, le=5)
    """Ingredients of the recipe."""
    take: int = Field(default=1, ge=0, le=5)
    """Ingredients that have to be found; at most those of the recipe."""
    go: Literal[1, 6, 9, 12] = 1
    """Rooms."""
    open: bool = False
    """Doors and containers have to be opened."""
    cook: bool = False
    """Some ingredients have to be cooked."""
    cut: bool = False
    """Some ingredients have to be cut."""
    drop: bool = False
    """Only so much can be carried."""
    split: Literal["train", "valid", "test"] = "train"
    """Which ingredients and preparations there are."""

    @model_validator(mode="after")
    def _takes_what_is_needed(self) -> CookingGame:
        if self.take > self.recipe:
            raise ValueError(f"take: {self.take} is more than the recipe's {self.recipe} ingredients")
        return self


class CustomGame(Section):
    """A quest through some rooms, drawn at random."""

    kind: Literal["custom"] = "custom"
    world_size: int = Field(default=2, ge=1, le=20)
    """Rooms."""
    nb_objects: int = Field(default=4, ge=1, le=50)
    """Things in them."""
    quest_length: int = Field(default=3, ge=1, le=20)
    """Actions that the quest takes."""


MadeGame = Annotated[CookingGame | CustomGame, Field(discriminator="kind")]


class TextworldSettings(Section):
    max_turns: int | None = Field(default=None, ge=1)
    """Turns of this episode; left out, `envgateway.textworld.max_turns`."""
    make: MadeGame = CustomGame()
    """Size and rewards of a game that is made, where the config names no folder of games; the row's `index` is the
    seed."""


def list_games(folder: Path) -> Sequence[str]:
    """Names in a folder of games, sorted. Raises ``ConfigError`` where there is none."""
    games = sorted(path.name for path in folder.iterdir() if _GAME_FILE.fullmatch(path.name))
    if not games:
        raise ConfigError(f"envgateway.textworld.games: there is no game file (such as .z8) in {folder}")
    return games


def game_of(task: Mapping[str, Any], folder: Path) -> Path:
    """The file of the game that a row asks for, by ``game`` (its name) or ``index``. Raises ``InvalidRequestError``."""
    games = list_games(folder)
    name = task.get("game")
    if name is None:
        index = index_of(task)
        if index >= len(games):
            raise InvalidRequestError(f"there is no game {index}; they count from 0 to {len(games) - 1}")
        name = games[index]
    elif name not in games:
        raise InvalidRequestError(f"there is no game {name!r} in the folder")
    return folder / name


def index_of(task: Mapping[str, Any]) -> int:
    index = task.get("index")
    if isinstance(index, bool) or not isinstance(index, int) or index < 0:
        raise InvalidRequestError("the task names no game: it needs `index`, a number from 0")
    return index
