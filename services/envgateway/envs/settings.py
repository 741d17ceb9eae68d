"""Settings that a task's row may carry for its environment, under the key ``environment``; and the row's question."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import Field, ValidationError

from services.common.config.base import Section
from services.common.errors import InvalidRequestError

_QUESTION_KEYS = ("question", "problem", "prompt")


class SingleStepSettings(Section):
    reward: str = "math"
    """A reward of the gateway (`math`, `boxed`), or the import path of a function (`package.module:function`)."""


class ToolSettings(SingleStepSettings):
    tools: list[str] = ["python"]
    """Tools of the gateway that the policy may call."""
    max_turns: int = Field(default=5, ge=1)
    """Turns; the call of the last one is not executed."""
    max_response_chars: int | None = Field(default=None, ge=16)
    """A longer tool response is cut; left out, each tool's own length: 256."""


class ToolCallsSettings(Section):
    tools: list[str] = ["python"]
    """Tools of the gateway that may be called."""
    max_response_chars: int | None = Field(default=None, ge=16)
    """A longer tool response is cut; left out, each tool's own length: 256."""


AnySettings = TypeVar("AnySettings", bound=Section)


def settings_of(task: Mapping[str, Any], kind: type[AnySettings]) -> AnySettings:
    try:
        return kind.model_validate(task.get("environment") or {})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, ("environment", *first["loc"])))
        raise InvalidRequestError(f"the task's {where}: {first['msg']}") from error


def question_of(task: Mapping[str, Any]) -> str:
    for key in _QUESTION_KEYS:
        value = task.get(key)
        if isinstance(value, str):
            return value
        if isinstance(value, list) and value and isinstance(value[-1], Mapping):  # a list of chat messages
            return str(value[-1].get("content", ""))
    raise InvalidRequestError(f"the task has no question: it needs one of {', '.join(_QUESTION_KEYS)}")
