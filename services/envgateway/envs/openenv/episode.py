"""One episode at an OpenEnv server.

The policy's text becomes the action: the value of one field, or a JSON object where an action has several. Text that is no
action is answered with the error, and the episode goes on. Numbers of the environment's state at its end are metrics.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

from services.common.config.processes.environments import OpenEnvConfig
from services.common.errors import InvalidRequestError
from services.envgateway.envs.base import EndStatus, EpisodeLostError, Observation, StepResult
from services.envgateway.envs.openenv.protocol import ErrorCode, Message, ServerRefusedError, answer_of
from services.envgateway.envs.openenv.session import OpenEnvSession

_MOST_CHARS = 100_000  # of an action
RESET_KEY = "reset"  # of a row: further arguments of reset
_INVALID = {"invalid_actions": 1.0}


class Sessions(Protocol):
    """The server as an episode sees it."""

    config: OpenEnvConfig
    url: str

    async def begin(self, arguments: Mapping[str, Any]) -> tuple[OpenEnvSession, Mapping[str, Any]]:
        """A session, and the answer to its reset."""
        ...

    async def action_field(self) -> str | None:
        """The field that the policy's text becomes; None where the text is a JSON object."""
        ...

    async def end(self, session: OpenEnvSession) -> None: ...


class OpenEnvEpisode:
    def __init__(self, server: Sessions) -> None:
        self._server = server
        self._session: OpenEnvSession | None = None
        self._field: str | None = None
        self._was_paid = False

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        """Begin. A server that draws nothing leaves the seed out."""
        arguments = task.get(RESET_KEY, {})
        if not isinstance(arguments, dict):
            raise InvalidRequestError(
                f"the task's {RESET_KEY!r} is {arguments!r:.80}; must be an object, the arguments of reset"
            )
        try:
            self._session, data = await self._server.begin({"seed": seed % 2**31, **arguments})
        except ServerRefusedError as refused:
            if refused.code == ErrorCode.VALIDATION_ERROR:
                raise InvalidRequestError(f"reset was refused: {refused.message}") from refused
            raise
        self._field = await self._server.action_field()
        answer = answer_of(data, self._server.url)
        if answer.done:
            raise EpisodeLostError(f"{self._server.url}: the episode was over at its reset")
        return Observation(text=self._text(answer.observation))

    async def step(self, action: str) -> StepResult:
        assert self._session is not None, "stepped before reset, or after the end"
        config = self._server.config
        try:
            payload = self._action(action)
        except ValueError as error:
            return StepResult(observation=f"The action must be a JSON object: {error}", metrics=_INVALID)
        try:
            data = await self._session.ask(Message.STEP, payload, Message.OBSERVATION, config.step_timeout_s)
        except ServerRefusedError as refused:
            if refused.code == ErrorCode.VALIDATION_ERROR:
                return StepResult(observation=f"The action was refused: {refused.message}", metrics=_INVALID)
            raise
        answer = answer_of(data, self._server.url)
        self._was_paid = self._was_paid or answer.reward is not None
        if answer.done and not self._was_paid:
            raise EpisodeLostError(f"{self._server.url}: the episode ended, and none of its steps told a reward")
        return StepResult(
            observation=self._text(answer.observation),
            reward=answer.reward or 0.0,
            done=answer.done,
            status=EndStatus.COMPLETED if answer.done else "",
            metrics=await self._state() if answer.done else {},
        )

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await self._server.end(session)

    def _action(self, text: str) -> dict[str, Any]:
        """Raises ``ValueError`` for text that is no action."""
        sendable = text[:_MOST_CHARS].encode(errors="replace").decode()
        if self._field is not None:
            return {self._field: sendable}
        action = json.loads(sendable)
        if not isinstance(action, dict):
            raise ValueError(f"it is a {type(action).__name__}")
        return action

    def _text(self, observation: Mapping[str, Any]) -> str:
        """The configured field; else the only text of the observation; else all of it as JSON."""
        field = self._server.config.observation
        if field is not None:
            if field not in observation:
                raise EpisodeLostError(
                    f"{self._server.url}: the observation has no {field!r} (envgateway.openenv.*.observation); it has "
                    f"{', '.join(observation) or 'nothing'}"
                )
            value = observation[field]
            return value if isinstance(value, str) else json.dumps(value)
        texts = [value for value in observation.values() if isinstance(value, str)]
        return texts[0] if len(texts) == 1 else json.dumps(dict(observation))

    async def _state(self) -> dict[str, float]:
        """Numbers of the state. The episode is over and paid: without an answer they are left out."""
        assert self._session is not None
        try:
            state = await self._session.ask(Message.STATE, None, Message.STATE, self._server.config.step_timeout_s)
        except EpisodeLostError:
            return {}
        return {
            f"state_{name}": float(value)
            for name, value in state.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
