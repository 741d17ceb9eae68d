"""A task-server adapter, or a pool of them: one conversation as an episode, rewards in every answer.

Meaning of its status codes:
- 404 means an unknown sample, or an unknown episode; an ended episode is unknown.
- 500 means that the task raised, or did not answer in time. The episode may keep its place until a cancellation. A pool
  wraps what its adapters answer, with their code.
- 503 means that a pool has no healthy adapter. Our own task server answers 503 when all places are taken, and 409 to a
  turn while another turn runs.
- A task that failed without raising is a done episode of reward 0, whose status alone tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from services.common.config.processes.environments import AgentBenchConfig
from services.common.errors import CapacityError, InfrastructureError, InvalidRequestError
from services.envgateway.envs.agentbench.http import HttpConnection, Reply
from services.envgateway.envs.agentbench.messages import (
    CancelEpisode,
    EpisodeAnswer,
    EpisodeInfo,
    Index,
    StartEpisode,
    StepEpisode,
    TextAction,
)
from services.envgateway.envs.agentbench.protocol import (
    CONTENT_REFUSED,
    ContentRefusedError,
    Opening,
    Session,
    Turn,
    chat,
    end_status,
    reward_of,
)
from services.envgateway.envs.base import EndStatus, EpisodeLostError

_FULL = (406, 429, 503)


class AdapterServer:
    def __init__(self, http: HttpConnection, config: AgentBenchConfig) -> None:
        self._http = http
        self._config = config

    async def indices(self) -> Sequence[Index]:
        """Adapters say how many samples there are, not which: they count from 0."""
        reply = await self._http.ask("task/info")
        info = reply.json
        if reply.status != 200 or not isinstance(info, dict) or not isinstance(info.get("num_samples"), int):
            raise InfrastructureError(f"{self._http.url} does not tell its task: {reply.status} {reply.detail}")
        return range(info["num_samples"])

    async def start(self, index: Index) -> Opening:
        body = StartEpisode(sample_id=index, config={}).model_dump()
        reply = await self._http.start("episode/start", self._config.start_timeout_s, body)
        if reply.status in _FULL:
            raise CapacityError(f"{self._http.url}: {reply.detail}", retry_after_s=2.0)
        if reply.status in (400, 404, 422):
            raise InvalidRequestError(f"{self._http.url} refuses sample {index!r}: {reply.detail}")
        if reply.status != 200:
            raise InfrastructureError(f"{self._http.url} could not start: {reply.status} {reply.detail}")
        answer = _answer(reply)
        observation = answer.get("observation")
        if answer.get("done") or not isinstance(observation, dict):
            raise InfrastructureError(f"the episode ended before its first turn: {reply.text:.200}")
        content = observation.get("content")
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else chat(content)
        return Opening(session=str(answer["episode_id"]), messages=messages)

    async def interact(self, session: Session, content: str) -> Turn:
        body = StepEpisode(episode_id=str(session), action=TextAction(content=content)).model_dump()
        reply = await self._http.take_turn("episode/step", self._config.step_timeout_s, body, _is_busy)
        if reply.status in CONTENT_REFUSED:
            raise ContentRefusedError(f"{self._http.url} refuses the action: {reply.status} {reply.detail}")
        if reply.status != 200:
            raise EpisodeLostError(f"{self._http.url} ended episode {session}: {reply.status} {reply.detail}")
        answer = _answer(reply)
        if answer.get("done"):
            info: EpisodeInfo = answer.get("info") or {}
            status = end_status(info.get("status", EndStatus.COMPLETED))
            return Turn(done=True, reward=reward_of(answer, status), status=status)
        observation = answer.get("observation")
        if not isinstance(observation, dict) or not isinstance(observation.get("content"), str):
            raise EpisodeLostError(f"the server's answer has no observation: {reply.text:.120}")
        return Turn(text=observation["content"], reward=reward_of(answer, EndStatus.COMPLETED))

    async def cancel(self, session: Session) -> None:
        await self._http.cancel("episode/cancel", CancelEpisode(episode_id=str(session)).model_dump())

    async def close(self) -> None:
        pass


def _is_busy(reply: Reply) -> bool:
    return reply.status == 409


def _answer(reply: Reply) -> EpisodeAnswer:
    body = reply.json
    if not isinstance(body, dict) or "episode_id" not in body:
        raise EpisodeLostError(f"the server's answer is no episode: {reply.text:.120}")
    return cast(EpisodeAnswer, body)
