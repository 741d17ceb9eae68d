"""One episode played by an AgentBench server. A task's row names its sample by ``index``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from services.common.errors import InvalidRequestError
from services.envgateway.envs.agentbench.protocol import AgentBenchServer, ContentRefusedError, Session, sendable
from services.envgateway.envs.base import EndStatus, EpisodeLostError, Observation, StepResult


class AgentBenchEpisode:
    def __init__(self, find_server: Callable[[], Awaitable[AgentBenchServer]]) -> None:
        self._find_server = find_server
        self._server: AgentBenchServer | None = None
        self._session: Session | None = None

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        """Reset. The server draws the task; the seed is not used."""
        index = task.get("index")
        if isinstance(index, bool) or not isinstance(index, int | str):
            raise InvalidRequestError("the task names no sample: it needs `index`, a number or a name")
        self._server = await self._find_server()
        opening = await self._server.start(index)
        self._session = opening.session
        text = "\n\n".join(message["content"] for message in opening.messages)
        return Observation(text=text, messages=opening.messages)

    async def step(self, action: str) -> StepResult:
        assert self._server is not None and self._session is not None, "stepped before reset, or after the end"
        try:
            turn = await self._server.interact(self._session, sendable(action))
        except ContentRefusedError as refused:
            await self.close()
            return StepResult(observation=refused.message, done=True, status=EndStatus.INVALID_ACTION)
        except EpisodeLostError:
            await self.close()  # some servers keep counting sessions at which they failed
            raise
        if turn.done:
            self._session = None  # the server has forgotten the session
        return StepResult(observation=turn.text, reward=turn.reward, done=turn.done, status=turn.status)

    async def close(self) -> None:
        session, self._session = self._session, None
        if self._server is not None and session is not None:
            await self._server.cancel(session)
