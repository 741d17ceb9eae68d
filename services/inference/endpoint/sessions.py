"""Captured sessions as the endpoint serves them: finds the thread of a request, and the answers that requests name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from services.common.errors import NotFoundError, UnknownPolicyError
from services.common.text.chat import Message
from services.inference.endpoint.body import read_body
from services.inference.endpoint.dialects.base import AnswerWriter, Dialect, DialectRequest, ItemLimits, validated
from services.inference.workflows.agents.captured import CapturedSession
from services.inference.workflows.agents.turns import DEFAULT_MODEL, CapturedTurn, Located, Thread, TurnRequest


class RewardTold(BaseModel):
    """The body of ``POST /v1/rewards``. ``id``: of an answer; left out, the reward is the rollout's."""

    model_config = ConfigDict(extra="forbid")

    reward: float = Field(allow_inf_nan=False)
    id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request that was read. ``locate`` finds its thread when the turn begins."""

    fields: DialectRequest
    turn: TurnRequest
    preface: tuple[Message, ...]
    locate: Callable[[], Located]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Continued:
    """An answer that a request may continue: the thread, its messages up to and with the answer, and their preface."""

    thread: Thread
    num_messages: int
    preface: tuple[Message, ...]


class ServedSession:
    """A captured session with its running requests and its answers."""

    def __init__(self, captured: CapturedSession, limits: ItemLimits) -> None:
        self.captured = captured
        self.running: set[asyncio.Task[Any]] = set()
        self._limits = limits
        self._answered: dict[str, _Continued] = {}
        self._stored: dict[str, dict[str, Any]] = {}  # bodies of answers by id

    def read(self, body: bytes, dialect: Dialect) -> Asked:
        given, items = read_body(body, dialect.items)
        fields = validated(dialect.request, given)
        turn = fields.ask(self._policy_of(fields.model))
        preface = tuple(fields.preface())
        new = dialect.read_items(items, self._limits)

        def locate() -> Located:
            return self.captured.locate(turn, [*preface, *self._messages_before(fields.previous()), *new])

        return Asked(fields=fields, turn=turn, preface=preface, locate=locate)

    def answered(self, answer_id: str, asked: Asked, turn: CapturedTurn) -> None:
        """Remember an answer, which later requests may name."""
        self._answered[answer_id] = _Continued(
            thread=turn.thread, num_messages=turn.num_messages, preface=asked.preface
        )

    def store(self, writer: AnswerWriter) -> None:
        """Keep the body of a finished answer where its dialect and its request want that."""
        if (body := writer.stored()) is not None:
            self._stored[writer.id] = body

    def stored(self, answer_id: str) -> dict[str, Any]:
        """The body of an answer; raises ``NotFoundError`` for one that is not kept."""
        if answer_id not in self._stored:
            raise NotFoundError(
                f"no response {answer_id!r} here: this session made none of this id, or its request had store: false",
                param="response_id",
                code="response_not_found",
            )
        return self._stored[answer_id]

    def give_reward(self, told: RewardTold) -> None:
        """Set the reward of the sequence that has an answer, or of the rollout. The last one told counts."""
        if told.id is None:
            self.captured.reward = told.reward
        else:
            self._answer(told.id, "id", "answer_not_found").thread.reward = told.reward

    def _messages_before(self, answer_id: str | None) -> Sequence[Message]:
        """The conversation up to and with an answer, without its preface: instructions are told anew."""
        if answer_id is None:
            return ()
        found = self._answer(answer_id, "previous_response_id", "previous_response_not_found")
        return found.thread.messages[len(found.preface) : found.num_messages]

    def _answer(self, answer_id: str, param: str, code: str) -> _Continued:
        found = self._answered.get(answer_id)
        if found is None:
            raise NotFoundError(f"{param} is {answer_id!r}; this session has no such answer", param=param, code=code)
        return found

    def _policy_of(self, model: str) -> str:
        captured = self.captured
        if model == DEFAULT_MODEL and captured.default_policy is not None:
            return captured.default_policy
        if model not in captured.policies:
            raise UnknownPolicyError(
                f"no model {model!r} here; there is {', '.join(captured.policies)}, and {DEFAULT_MODEL!r} for the one that "
                "workflow.settings.policy names",
                param="model",
            )
        return model


def model_told(name: str) -> dict[str, Any]:
    """A policy as a model, with the fields of OpenAI's and of Anthropic's clients."""
    ours = {"id": name, "object": "model", "created": 0, "owned_by": "rollmill"}
    return {**ours, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


def models_told(names: Iterable[str]) -> dict[str, Any]:
    data = [model_told(name) for name in names]
    page = {"has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"has_more": False}
    return {"object": "list", "data": data, **page}
