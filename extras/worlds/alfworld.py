"""Prompts for ALFWorld; all other text comes from the engine.

The form is AgentBench's: an instruction, a promise to follow the instruction, one example of the same type of task,
then the task with the actions that are possible now. The words are our own, in ``alfworld.txt``.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import json
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from extras.worlds.engines.pool import EnginePool
from extras.worlds.messages import MALFORMED, TextGame, TextGameSettings, index_of, offer, read_action, read_turns
from extras.worlds.settings import AlfworldConfig, WorldsSections
from services.common.errors import ConfigError, InvalidRequestError
from services.common.installing import install
from services.envgateway.envs.base import EndStatus, Observation, StepResult, settings_of

if TYPE_CHECKING:
    from services.cli.check.worlds import AskedTasks

USER, AGENT = "user", "assistant"
EXAMPLE_LEAD = "Here is an example of how it goes.\n"
TASK_LEAD = "Now your own task. "
_PLAIN = "pick_and_place"
EXAMPLES = read_turns("alfworld.txt")  # by the first part of a game's folder
INSTRUCTION, PROMISE = EXAMPLES.pop("OPENING")


def opening(folder: str, room: str, admissible: Sequence[str]) -> list[dict[str, str]]:
    """The conversation up to the policy's first turn, with the example for the type of task that a game's folder is named for; a
    plain one for any other name."""
    first, *rest = EXAMPLES[next((kind for kind in EXAMPLES if folder.startswith(kind)), _PLAIN)]
    turns = [INSTRUCTION, PROMISE, EXAMPLE_LEAD + first, *rest, TASK_LEAD + room + offer(admissible)]
    return [
        {"role": AGENT, "content": turn.rstrip("\n")} if place % 2 else {"role": USER, "content": turn}
        for place, turn in enumerate(turns)
    ]


def as_text(messages: Sequence[Mapping[str, str]]) -> str:
    """The opening as one message, for a policy that starts with one: the instruction, the example, the task."""
    instruction, _, *example, task = (message["content"] for message in messages)
    return "\n".join([instruction, *(text.strip() for text in example), "", task])


# --- Maps an action that is not listed to the most similar listed action.


_LEAST_ALIKE = 0.01


def choose(action: str, admissible: Sequence[str]) -> str:
    """The action if listed, else the most similar listed action, else the action unchanged: the engine will refuse.

    The first of equals wins.
    """
    if not admissible or action in admissible:
        return action
    likeness = [round(bleu(listed, action), 12) for listed in admissible]
    best = max(likeness)
    return admissible[likeness.index(best)] if best > _LEAST_ALIKE else action


_LONGEST = 4
_SMOOTHING = 5.0


def bleu(reference: str, candidate: str) -> float:
    """0 when they share no word. Not symmetric: a candidate that is too short is punished, one too long only diluted."""
    reference_words, words = reference.split(), candidate.split()
    shared = [_shared(reference_words, words, n) for n in range(1, _LONGEST + 1)]
    if shared[0] == 0:
        return 0.0
    logs = 0.0
    missing = 0
    for n, count in enumerate(shared, start=1):
        possible = max(1, len(words) - n + 1)
        if count > 0:
            logs += math.log(count / possible)
        elif len(words) > 1:  # a single word has no longer n-grams to be judged by
            missing += 1
            logs += math.log(math.log(len(words)) / (2**missing * _SMOOTHING) / possible)
    brevity = 1.0 if len(words) > len(reference_words) else math.exp(1 - len(reference_words) / len(words))
    return brevity * math.exp(logs / _LONGEST)


def _shared(reference: Sequence[str], candidate: Sequence[str], n: int) -> int:
    """Number of the candidate's n-grams that the reference has, each counted at most as often as there."""
    return (_grams(candidate, n) & _grams(reference, n)).total()


def _grams(words: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))


# --- List of games: files ``game.tw-pddl`` below a data folder, counted in a list.


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
    name = task.get("game")
    if isinstance(name, str):
        if not (data / name).resolve().is_relative_to(data.resolve()):
            raise InvalidRequestError(f"the game {name!r} is not below the data folder")
        return name
    return games.names[index_of(task, len(games.names), games.holds())]


def _read_list(path: Path) -> list[str]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"envgateway.alfworld.games: {path} cannot be read: {error}") from error
    lists = list(content.values()) if isinstance(content, dict) else [content]
    if not all(isinstance(games, list) and all(isinstance(game, str) for game in games) for games in lists):
        raise ConfigError(f"envgateway.alfworld.games: {path} must hold a list of paths, or such lists by name")
    return [game for games in lists for game in games]


# --- One episode of ALFWorld: messages to the policy, effects of its replies, and how the episode ends.


_SAME_REPLIES = 3


class AlfworldEpisode(TextGame):
    def __init__(self, pool: EnginePool, data: Path, games: Callable[[], GameList], max_turns: int) -> None:
        """``games`` may block at its first call: the call reads a folder."""
        super().__init__(pool, max_turns)
        self._data = data
        self._games = games
        self._replies: deque[str] = deque(maxlen=_SAME_REPLIES)  # the last that held an action
        self._taken = 0  # all that held one
        self._counted["replaced_actions"] = 0

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        """Reset. The row names the game; the seed is not used."""
        name = game_of(task, await asyncio.to_thread(self._games), self._data)
        answer = await self._open(settings_of(task, TextGameSettings), {"path": str((self._data / name).absolute())})
        room = "\n".join(answer["feedback"].split("\n\n")[1:])  # without the engine's welcome
        messages = opening(_folder(name), room, self._admissible)
        return Observation(
            text=as_text(messages),
            admissible_actions=self._admissible,
            messages=messages,
        )

    async def step(self, action: str) -> StepResult:
        command = read_action(action)
        if command is None:
            return self._unread(MALFORMED)
        chosen = choose(command, self._admissible)
        answer = await self._play(chosen)
        self._counted["replaced_actions"] += chosen != command
        self._replies.append(action)
        self._taken += 1
        text = _heard(answer["feedback"]) + offer(self._admissible)
        if self._taken > _SAME_REPLIES and len(set(self._replies)) == 1:
            return self._result(text, EndStatus.INVALID_ACTION)
        won = bool(answer["done"] and answer["won"])
        return self._result(text, EndStatus.COMPLETED if answer["done"] else "", float(won), won)


def _folder(game: str) -> str:
    """The folder that is named for the task: two above the file."""
    parts = PurePosixPath(game).parts
    return parts[-3] if len(parts) >= 3 else ""


def _heard(feedback: str) -> str:
    """The text without numbers of places (``You arrive at loc 7.``), which tell a policy no fact."""
    return feedback.split(". ", 1)[-1] if feedback.startswith("You arrive at loc ") else feedback


class AlfworldWorld(EnginePool):
    """State shared by episodes. Games are listed, and the engine is started, with the first episode."""

    is_indexed = True

    def __init__(self, config: AlfworldConfig, data: Path) -> None:
        # Importing alfworld makes the folder that the variable names.
        super().__init__(
            "alfworld", "extras.worlds.engines.alfworld", config.engine, {"ALFWORLD_DATA": str(data.absolute())}
        )
        self._settings = config
        self._data = data

    @functools.cached_property
    def games(self) -> GameList:
        """Raises ``ConfigError``."""
        return list_games(self._data, self._settings)

    def build(self) -> AlfworldEpisode:
        return AlfworldEpisode(self, self._data, lambda: self.games, self._settings.max_turns)


def make_world(config: WorldsSections, sandbox: object) -> AlfworldWorld | str:
    data, games = config.alfworld.data, config.alfworld.games
    missing = []
    if importlib.util.find_spec("alfworld") is None:
        missing.append(f"its engine is not installed: {install('alfworld')}")
    if data is None:
        missing.append("write envgateway.alfworld.data: FOLDER, which holds ALFWorld's json_2.1.1")
    elif not data.is_dir():
        missing.append(f"envgateway.alfworld.data: there is no folder {data.absolute()}")
    if games is not None and not games.is_file():
        missing.append(f"envgateway.alfworld.games: there is no file {games.absolute()}")
    return AlfworldWorld(config.alfworld, data) if data is not None and not missing else "; ".join(missing)


def task_problems(gateway: WorldsSections, asked: Iterable[AskedTasks]) -> Iterator[str]:
    """A line for each dataset that asks for games which the list does not have, or which are not in the folder."""
    config, asked = gateway.alfworld, list(asked)
    for one in asked:
        if one.reference and config.games is None:
            yield (
                f"{one.dataset} counts in AgentBench's list of games, and games in a folder have another order: name "
                "the list with envgateway.alfworld.games (recipes/alfworld/README.md says where it is from)"
            )
    data = config.data
    if data is None or not (data.is_dir() if config.games is None else config.games.is_file()):
        return
    games = list_games(data, config)
    for one in asked:
        if beyond := one.outside(len(games.names)):
            yield f"{games.holds()}; {beyond}"
        names = [games.names[index] for index in one.indices if 0 <= index < len(games.names)]
        absent = [name for name in names if data.is_dir() and not (data / name).is_file()]
        if absent:
            yield (
                f"{len(absent)} of the {len(names)} games that {one.dataset} asks for are not below "
                f"envgateway.alfworld.data ({data.absolute()}), such as {absent[0]}"
            )
