"""OpenEnv's messages: what goes over the socket of one episode, and how its answers are read.

    {"type": "reset", "data": {"seed": 1, ...}}  ->  {"type": "observation", "data": {"observation", "reward", "done"}}
    {"type": "step", "data": {the action}}       ->  the same
    {"type": "state"}                            ->  {"type": "state", "data": {...}}
    {"type": "close"}                            ->  the end of the socket
    any of them                                  ->  {"type": "error", "data": {"message", "code"}}

An answer of another form is of another version of the protocol: the episode is lost, and never has a reward.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.envgateway.envs.base import EpisodeLostError

_SHOWN_CHARACTERS = 500


class Message(enum.StrEnum):
    RESET = "reset"
    STEP = "step"
    STATE = "state"
    CLOSE = "close"
    OBSERVATION = "observation"
    ERROR = "error"


class ErrorCode(enum.StrEnum):
    """Those of the server's codes that decide what is done."""

    CAPACITY_REACHED = "CAPACITY_REACHED"
    VALIDATION_ERROR = "VALIDATION_ERROR"
    UNKNOWN_TYPE = "UNKNOWN_TYPE"
    INVALID_JSON = "INVALID_JSON"


class ServerRefusedError(EpisodeLostError):
    """The server answered with an error. ``code`` is its word, which need not be one of ``ErrorCode``."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An observation with its reward, which is None where the server tells none."""

    observation: Mapping[str, Any]
    reward: float | None
    done: bool


def content_of(text: str, wanted: Message, url: str) -> Mapping[str, Any]:
    """The data of an answer. Raises ``ServerRefusedError``, and ``EpisodeLostError`` for another protocol."""
    try:
        answer = json.loads(text)
    except ValueError:
        answer = None
    kind, data = (answer.get("type"), answer.get("data")) if isinstance(answer, dict) else (None, None)
    if not isinstance(data, dict) or kind not in (wanted.value, Message.ERROR.value):
        raise EpisodeLostError(f"{url} speaks another version of OpenEnv's protocol: it answered {shown(text)}")
    if kind == Message.ERROR.value:
        code = str(data.get("code", ""))
        told = shown(str(data.get("message", "")))
        if errors := data.get("errors"):
            told += f": {shown(json.dumps(errors))}"
        raise ServerRefusedError(f"{url} answered {code or 'an error'}: {told}", code)
    return data


def answer_of(data: Mapping[str, Any], url: str) -> Answer:
    """Raises ``EpisodeLostError`` for data that is no observation."""
    observation, reward, done = data.get("observation"), data.get("reward"), data.get("done", False)
    told = reward is None or isinstance(reward, int | float)
    if not isinstance(observation, dict) or not told or not isinstance(done, bool):
        raise EpisodeLostError(
            f"{url} speaks another version of OpenEnv's protocol: its observation is {shown(str(data))}"
        )
    return Answer(observation=observation, reward=None if reward is None else float(reward), done=done)


def shown(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
