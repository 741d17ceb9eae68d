"""State shared by the episodes of one OpenEnv server: its address or its process, its sessions, and the form of its actions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import aiohttp
import structlog

from services.common.config.processes.environments import OpenEnvConfig
from services.common.errors import CapacityError, InfrastructureError, InvalidRequestError
from services.envgateway.envs.base import EndStatus, EpisodeLostError, Observation, StepResult
from services.envgateway.envs.openenv.process import ServerProcess
from services.envgateway.envs.openenv.session import ErrorCode, Message, OpenEnvSession, ServerRefusedError, answer_of

log = structlog.get_logger()


_MOST_CHARS = 100_000  # of an action
RESET_KEY = "reset"  # of a row: further arguments of reset
_INVALID = {"invalid_actions": 1.0}


class OpenEnvEpisode:
    """The policy's text becomes the action: the value of one field, or a JSON object where an action has several.

    Text that is no action is answered with the error, and the episode goes on. Numbers of the environment's state at
    its end are metrics.
    """

    def __init__(self, server: OpenEnvWorld) -> None:
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


_QUESTION_S = 10.0  # a request for the schema


class OpenEnvWorld:
    """Plays each episode over a socket of its own. The server is first spoken to by the first episode."""

    is_remote = True  # the server is at fault for errors of its episodes, not the action

    def __init__(self, name: str, config: OpenEnvConfig) -> None:
        self.config = config
        self._name = name
        self._process = ServerProcess(f"envgateway.openenv.{name}", config) if config.command else None
        self.url = config.url or ""
        self._client: aiohttp.ClientSession | None = None
        self._open: set[OpenEnvSession] = set()
        self._field: str | None = None
        self._field_is_known = False

    def build(self) -> OpenEnvEpisode:
        return OpenEnvEpisode(self)

    async def begin(self, arguments: Mapping[str, Any]) -> tuple[OpenEnvSession, Mapping[str, Any]]:
        try:
            return await self._begin(arguments)
        except CapacityError:
            # A server of ours that is full without a session of ours has leaked their places.
            if self._process is None or self._open:
                raise
            log.warning("openenv.leaked_places", environment=self._name)
            await self._process.restart()
            return await self._begin(arguments)

    async def action_field(self) -> str | None:
        """Raises ``InfrastructureError`` where the server does not tell the form of its actions."""
        if self.config.action is not None:
            return self.config.action
        if not self._field_is_known:
            self._field = _text_field(await self._schema())
            self._field_is_known = True
        return self._field

    async def end(self, session: OpenEnvSession) -> None:
        try:
            await session.close()
        finally:
            self._open.discard(session)

    async def close(self) -> None:
        for session in list(self._open):
            await self.end(session)
        if self._client is not None:
            await self._client.close()
            self._client = None
        if self._process is not None:
            await self._process.close()

    async def _begin(self, arguments: Mapping[str, Any]) -> tuple[OpenEnvSession, Mapping[str, Any]]:
        if self._process is not None:
            self.url = await self._process.url()
        session = await OpenEnvSession.open(self._opened(), self.url, self.config.start_timeout_s)
        self._open.add(session)
        try:
            return session, await session.ask(
                Message.RESET, arguments, Message.OBSERVATION, self.config.start_timeout_s
            )
        except BaseException:  # cancelled, too: the place must be free again
            await self.end(session)
            raise

    async def _schema(self) -> Any:
        url = f"{self.url.rstrip('/')}/schema"
        try:
            async with asyncio.timeout(_QUESTION_S), self._opened().get(url) as response:
                return (await response.json())["action"]
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError, KeyError, TypeError) as error:
            raise InfrastructureError(
                f"{url} does not tell the form of an action ({type(error).__name__}): name its field in "
                f"envgateway.openenv.{self._name}.action"
            ) from error

    def _opened(self) -> aiohttp.ClientSession:
        if self._client is None:
            connector = aiohttp.TCPConnector(limit=self.config.connections)
            self._client = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        return self._client


def _text_field(schema: Any) -> str | None:
    """The only required field of an action, where it is text.

    >>> _text_field({"properties": {"message": {"type": "string"}, "metadata": {}}, "required": ["message"]})
    'message'
    """
    required = schema.get("required", []) if isinstance(schema, dict) else []
    fields = schema.get("properties", {}) if isinstance(schema, dict) else {}
    is_text = len(required) == 1 and fields.get(required[0], {}).get("type") == "string"
    return str(required[0]) if is_text else None
