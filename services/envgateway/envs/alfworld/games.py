"""List of games: files ``game.tw-pddl`` below a data folder, counted in a list."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.config.processes.environments import AlfworldConfig
from services.common.errors import ConfigError, InvalidRequestError

GAME_FILE = "game.tw-pddl"


@dataclass(frozen=True, slots=True)
class GameList:
    """Games that a task's ``index`` counts in."""

    names: Sequence[str]  # paths relative to the data folder
    source: str  # the setting that names the source, and the file or folder

    def holds(self) -> str:
        """Source and number of the games, for error messages."""
        return f"{self.source} holds {len(self.names)} games"


def list_games(data: Path, config: AlfworldConfig) -> GameList:
    """Raises ``ConfigError`` for a list that cannot be read, and where there is no game."""
    if config.games is None:
        names = sorted(path.relative_to(data).as_posix() for path in data.rglob(GAME_FILE))
        games = GameList(names, f"envgateway.alfworld.data ({data.absolute()})")
    else:
        games = GameList(_read_list(config.games), f"envgateway.alfworld.games ({config.games.absolute()})")
    if not games.names:
        raise ConfigError(
            f"{games.source} holds no game" + ("" if config.games else f": there is no {GAME_FILE} below")
        )
    return games


def game_of(task: Mapping[str, Any], games: GameList, data: Path) -> str:
    """The game that a task's row asks for: by ``game``, a path relative to ``data``, or by ``index``.

    Raises:
        InvalidRequestError: there is no such game.
    """
    name, index = task.get("game"), task.get("index")
    if isinstance(name, str):
        if not (data / name).resolve().is_relative_to(data.resolve()):
            raise InvalidRequestError(f"the game {name!r} is not below the data folder")
        return name
    if isinstance(index, bool) or not isinstance(index, int):
        raise InvalidRequestError("the task names no game: it needs `index` (a number) or `game` (a path)")
    if not 0 <= index < len(games.names):
        raise InvalidRequestError(f"{games.holds()}, and indices count from 0; the task asks for index {index}")
    return games.names[index]


def _read_list(path: Path) -> list[str]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"envgateway.alfworld.games: {path} cannot be read: {error}") from error
    lists = list(content.values()) if isinstance(content, dict) else [content]
    if not all(isinstance(games, list) and all(isinstance(game, str) for game in games) for games in lists):
        raise ConfigError(f"envgateway.alfworld.games: {path} must hold a list of paths, or such lists by name")
    return [game for games in lists for game in games]
