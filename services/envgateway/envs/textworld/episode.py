"""One episode of a TextWorld game. Its rewards are the shares of the game's score, 1 in all; 1 for a win without a score."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from services.common.config.processes.environments import TextworldConfig
from services.envgateway.envs.base import EndStatus, Observation, StepResult
from services.envgateway.envs.engines.pool import EnginePool, Game
from services.envgateway.envs.replies import MALFORMED, offer, read_action, without_offer
from services.envgateway.envs.settings import settings_of
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
        text = opening(answer["feedback"], answer["objective"], self._admissible)
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
        text = tidy(answer["feedback"]) + offer(self._admissible)
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


_MODULE = "services.envgateway.envs.textworld.engine"


class TextworldWorld:
    """State shared by episodes: a world (see ``envs/base.py``). No process runs before the first episode."""

    def __init__(self, config: TextworldConfig) -> None:
        self._config = config
        self.max_turns = config.max_turns
        self._maker = GameMaker(config.cache, config.make_timeout_s)
        self.pool = EnginePool("textworld", _MODULE, config.engine, {})

    @property
    def gauges(self) -> dict[str, float]:
        return self.pool.gauges

    def build(self) -> TextworldEpisode:
        return TextworldEpisode(self.pool, self._maker, self._config.games, self.max_turns)

    async def close(self) -> None:
        await self.pool.close()


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
