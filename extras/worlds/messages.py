"""What the text worlds have in common: a list of actions ends each message, ``ACTION:`` begins an answer, turns are counted."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from services.common.config.base import Section
from services.common.errors import InvalidRequestError
from services.envgateway.envs.base import MOST_COMMAND_CHARS, EndStatus, StepResult

if TYPE_CHECKING:
    from extras.worlds.engines.pool import EnginePool, Game
    from extras.worlds.engines.process import Answer

ACTIONS_LEAD = " AVAILABLE ACTIONS: "
MALFORMED = """\
Error: there is no action in your reply. Write

THOUGHT: what you think (may be left out)
ACTION: your next action

with one of the available actions.
"""

_ACTION = re.compile(r"ACTION:(.*)")


def read_turns(name: str) -> dict[str, list[str]]:
    """Conversations in a file of this folder, by name: a line ``=== NAME`` begins each, and lines ``---`` divide its turns."""
    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    _, *parts = re.split(r"^=== (\w+)\n", text, flags=re.MULTILINE)
    return {
        kind: re.split(r"^---\n", turns, flags=re.MULTILINE)
        for kind, turns in zip(parts[::2], parts[1::2], strict=True)
    }


def read_action(reply: str) -> str | None:
    """The text after the first ``ACTION:`` on its line, lower-cased; None when empty or too long for an action."""
    found = _ACTION.search(reply)
    command = found[1].strip() if found else ""
    return command.lower() if 0 < len(command) <= MOST_COMMAND_CHARS else None


def offer(admissible: Sequence[str]) -> str:
    """The list that ends every message to the policy; empty where a world lists no actions."""
    return ACTIONS_LEAD + "\n".join(admissible) + "\n" if admissible else ""


def index_of(task: Mapping[str, Any], number: int, holds: str) -> int:
    """The ``index`` of a task's row in a list of so many, which ``holds`` names. Raises ``InvalidRequestError``."""
    index = task.get("index")
    if isinstance(index, bool) or not isinstance(index, int):
        raise InvalidRequestError("the task names nothing to play: it needs `index`, a whole number from 0")
    if not 0 <= index < number:
        raise InvalidRequestError(f"{holds}, and indices count from 0; the task asks for index {index}")
    return index


class TextGameSettings(Section):
    max_turns: int | None = Field(default=None, ge=1)
    """Turns of this episode; left out, those of the world's section, such as `envgateway.alfworld.max_turns`."""


class TextGame:
    """One episode: a game of the engine's pool."""

    def __init__(self, pool: EnginePool, max_turns: int) -> None:
        self._pool = pool
        self._max_turns = max_turns
        self._game: Game | None = None
        self._admissible: Sequence[str] = ()
        self._turns = 0
        self._counted: Counter[str] = Counter(malformed_replies=0)  # metrics of the episode

    async def _open(self, settings: TextGameSettings, game: Mapping[str, Any]) -> Answer:
        """Load the game; returns its first answer."""
        self._max_turns = settings.max_turns or self._max_turns
        self._game, answer = await self._pool.open(game)
        self._admissible = answer["admissible"]
        return answer

    async def _play(self, command: str) -> Answer:
        """Take a turn. A turn that the engine could not take did not happen."""
        assert self._game is not None, "stepped before reset"
        answer = await self._game.step(command)
        self._turns += 1
        self._admissible = answer["admissible"]
        return answer

    async def close(self) -> None:
        if self._game is not None:
            self._game.close()

    def _unread(self, told: str) -> StepResult:
        """The reply holds no action: the turn is used."""
        self._turns += 1
        self._counted["malformed_replies"] += 1
        return self._result(told + offer(self._admissible))

    def _result(self, text: str, status: str = "", reward: float = 0.0, won: bool = False) -> StepResult:
        if not status and self._turns >= self._max_turns:
            status = EndStatus.TURN_LIMIT
        return StepResult(
            observation=text,
            reward=reward,
            done=bool(status),
            admissible_actions=self._admissible,
            metrics={"won": float(won), **{name: float(n) for name, n in self._counted.items()}},
            status=status,
        )
