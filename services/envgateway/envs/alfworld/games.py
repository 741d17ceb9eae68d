"""Which games there are: files ``game.tw-pddl`` below a data folder, counted in a list."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from services.common.config.environments import AlfworldConfig
from services.common.errors import ConfigError, InvalidRequestError

GAME_FILE = "game.tw-pddl"


def list_games(data: Path, config: AlfworldConfig) -> Sequence[str]:
    """Paths relative to ``data``. Raises ``ConfigError`` for a list that cannot be read, and where there is no game."""
    if config.games is None:
        games = sorted(path.relative_to(data).as_posix() for path in data.rglob(GAME_FILE))
    else:
        games = _read_list(config.games)
    if not games:
        raise ConfigError(f"envgateway.alfworld: there is no {GAME_FILE} below {data}")
    return games


def game_of(task: Mapping[str, Any], games: Sequence[str], data: Path) -> str:
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
    if not 0 <= index < len(games):
        raise InvalidRequestError(f"there is no game {index}; they count from 0 to {len(games) - 1}")
    return games[index]


def _read_list(path: Path) -> list[str]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"envgateway.alfworld.games: {path} cannot be read: {error}") from error
    lists = list(content.values()) if isinstance(content, dict) else [content]
    if not all(isinstance(games, list) and all(isinstance(game, str) for game in games) for games in lists):
        raise ConfigError(f"envgateway.alfworld.games: {path} must hold a list of paths, or such lists by name")
    return [game for games in lists for game in games]
