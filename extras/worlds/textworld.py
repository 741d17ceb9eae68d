"""One episode of a TextWorld game. Its rewards are the shares of the game's score, 1 in all; 1 for a win without a score."""

from __future__ import annotations

import importlib.util
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from extras.worlds.engines.pool import EnginePool
from extras.worlds.messages import MALFORMED, TextGame, TextGameSettings, index_of, offer, read_action
from extras.worlds.settings import GamesConfig, WorldsSections
from services.common.config.base import Section
from services.common.errors import ConfigError, InvalidRequestError
from services.common.installing import install
from services.envgateway.envs.base import EndStatus, Observation, StepResult, settings_of

# --- Finds the game that a task's row asks for: a file of a folder, or a game to be made.


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


class TextworldSettings(TextGameSettings):
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
        name = games[index_of(task, len(games), f"{folder} holds {len(games)} games")]
    elif name not in games:
        raise InvalidRequestError(f"there is no game {name!r} in the folder")
    return folder / name


def make_arguments(game: CookingGame | CustomGame, seed: int) -> list[str]:
    """Of TextWorld's ``tw-make``, without the place of the game."""
    common = ["--seed", str(seed), "--silent"]
    if isinstance(game, CustomGame):
        return [
            "custom", "--world-size", str(game.world_size), "--nb-objects", str(game.nb_objects),
            "--quest-length", str(game.quest_length), *common,
        ]  # fmt: skip
    switches = [f"--{name}" for name in ("open", "cook", "cut", "drop") if getattr(game, name)]
    return [
        "tw-cooking", "--recipe", str(game.recipe), "--take", str(game.take), "--go", str(game.go),
        "--recipe-seed", str(seed), "--split", game.split, *switches, *common,
    ]  # fmt: skip


class TextworldEpisode(TextGame):
    def __init__(self, pool: EnginePool, config: GamesConfig) -> None:
        super().__init__(pool, config.max_turns)
        self._config = config
        self._max_score = 0.0
        self._score = 0.0

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        """The game comes from the row alone, so that all episodes of a task play the same; ``seed`` is its chance."""
        settings = settings_of(task, TextworldSettings)
        if self._config.games is None:
            cache = Path(tempfile.gettempdir()) / f"rollmill-textworld-{os.getuid()}"
            game: dict[str, Any] = {
                "make": make_arguments(settings.make, index_of(task, 2**63, "seeds are below 2**63")),
                "cache": str(cache.absolute()),
            }
        else:
            game = {"path": str(game_of(task, self._config.games).absolute())}
        answer = await self._open(settings, {**game, "seed": seed % 2**31})
        self._max_score = answer["max_score"]
        text = opening(answer["feedback"], answer["objective"], self._admissible)
        return Observation(text=text, admissible_actions=self._admissible)

    async def step(self, action: str) -> StepResult:
        command = read_action(action)
        if command is None or not is_of_the_game(command):
            return self._unread(MALFORMED if command is None else REFUSED)
        answer = await self._play(command)
        text = tidy(answer["feedback"]) + offer(self._admissible)
        reward = float(answer["won"])
        if self._max_score > 0:
            reward, self._score = (answer["score"] - self._score) / self._max_score, answer["score"]
        return self._result(text, EndStatus.COMPLETED if answer["done"] else "", reward, answer["won"])


class TextworldWorld(EnginePool):
    """State shared by episodes: a world (see ``envs/base.py``). No process runs before the first episode."""

    def __init__(self, config: GamesConfig) -> None:
        super().__init__("textworld", "extras.worlds.engines.textworld", config.engine, {})
        self._settings = config

    def build(self) -> TextworldEpisode:
        return TextworldEpisode(self, self._settings)


def make_world(config: WorldsSections, sandbox: object) -> TextworldWorld | str:
    games = config.textworld.games
    if importlib.util.find_spec("textworld") is None:
        return f"its engine is not installed: {install('textworld')}"
    if games is not None and not games.is_dir():
        return f"envgateway.textworld.games: there is no folder {games.absolute()}"
    return TextworldWorld(config.textworld)


REFUSED = "That is no command of this game.\n"
_MOST_CHARS = 200  # more does not fit into an interpreter's line
_WORDS = re.compile(r"[a-z0-9 ',.;:!?\"-]+")
_SENTENCE_END = re.compile(r"[.,;:!?\"]| then | and ")
# Inform's words for the interpreter, and those of its testing that a game may have been compiled with.
_META = """
    save restore restart quit q undo oops script transcript noscript unscript recording replay verify restrict notify
    actions changes gonear goto random routines messages scope showdict dict showobj showverb timers daemons trace
    abstract purloin tree glklist showme test rules relations showheap scenes
"""
_OF_THE_INTERPRETER = frozenset(_META.split())


def is_of_the_game(command: str) -> bool:
    """Whether a lower-cased command may be given to the game, and is none of its interpreter.

    The interpreter reads some commands itself: ``save`` and ``script`` write files on the gateway's machine, ``quit``
    and ``restart`` begin a dialogue outside the game, ``tw-trace-actions`` turns off the list of actions, and a line
    that begins with a backslash is an order to the interpreter's screen, which may never return. A game's own words are
    plain letters.

    >>> is_of_the_game("take the knife, then go east"), is_of_the_game("look. save"), is_of_the_game("\\\\x")
    (True, False, False)
    """
    if len(command) > _MOST_CHARS or not _WORDS.fullmatch(command):
        return False
    sentences = (sentence.split() for sentence in _SENTENCE_END.split(command))
    first_words = [words[0].strip("'-") for words in sentences if words]
    return bool(first_words) and not any(word in _OF_THE_INTERPRETER or word.startswith("tw-") for word in first_words)


INSTRUCTION = """\
You are playing a text game. You are told where you are and what you are after; after each of your actions you are told \
what happened. Each reply is one of these two:

THOUGHT: what you think
ACTION: what you do

or only

ACTION: what you do

One action per reply, a short command such as one of the available actions.

"""
_BANNER = re.compile(r"[\s_|\\/$<>]+")
_STATUS_LINE = re.compile(r"^>\s.*$", re.MULTILINE)  # the prompt, and the status line beside the prompt


def opening(feedback: str, objective: str, admissible: Sequence[str]) -> str:
    """The first message. Games tell their objective themselves, or the file beside them does."""
    scene = tidy(feedback)
    told = objective if objective and objective not in scene else ""
    return INSTRUCTION + "\n".join(filter(None, (told, scene))) + offer(admissible)


def tidy(feedback: str) -> str:
    """The text without the title's drawing, the prompt and empty lines at either end or in a row."""
    lines = [
        line.rstrip()
        for line in _STATUS_LINE.sub("", feedback).splitlines()
        if not (line.strip() and _BANNER.fullmatch(line))
    ]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()
