"""A classic controller: sessions by number, the conversation so far in every answer.

Meaning of its status codes, which differ from common use:
- 406 means no free worker, or an unknown task.
- A plain-text 500 means that a lock was not free for a second: the request had no effect; try again.
- 501 means that the task raised. The controller goes on listing the session and counting its slot, which only a
  synchronisation with the workers frees; the worker has forgotten the session, so no cancellation works.
- 400 after the end: the controller has forgotten the session.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import structlog

from services.common.aio import TaskOwner, backoff
from services.common.config.processes.environments import AgentBenchConfig
from services.common.errors import CapacityError, ConfigError, InfrastructureError, InvalidRequestError
from services.envgateway.envs.agentbench.http import HttpConnection, Reply, UnansweredError
from services.envgateway.envs.agentbench.messages import (
    AgentResponse,
    CancelSession,
    Index,
    Interact,
    SampleOutput,
    SessionAnswer,
    StartSample,
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
from services.envgateway.envs.base import EpisodeLostError

log = structlog.get_logger()

_SYNC_S = 60.0
_SYNC_ATTEMPTS = 6
_RUNNING = "running"
_BUSY_400 = "Task Executing"  # a busy worker's answer to a question


class ClassicServer:
    def __init__(self, http: HttpConnection, config: AgentBenchConfig) -> None:
        self._http = http
        self._config = config
        self._name = config.task
        self._tasks = TaskOwner()
        self._leaked: set[str] = set()  # sessions that the controller counts and no worker has
        self._syncing: asyncio.Task[Any] | None = None

    async def indices(self) -> Sequence[Index]:
        reply = await self._http.ask("get_indices", name=await self._task_name())
        indices = reply.json
        if reply.status != 200 or not isinstance(indices, list):
            raise InfrastructureError(f"{self._http.url} does not list its indices: {reply.status} {reply.detail}")
        return indices

    async def start(self, index: Index) -> Opening:
        name = await self._task_name()
        body = StartSample(name=name, index=index).model_dump()
        reply = await self._http.start("start_sample", self._config.start_timeout_s, body)
        match reply.status:
            case 200:
                return self._opening(reply)
            case 406 if "does not exist" in reply.detail:
                raise InfrastructureError(f"{self._http.url} has no task {name!r}, or no worker of it yet")
            case 406:
                raise CapacityError(f"{self._http.url}: {reply.detail}", retry_after_s=1.0)
            case 500:
                raise CapacityError(f"{self._http.url} is busy: {reply.detail}", retry_after_s=1.0)
            case 400 if "out of bounds" in reply.detail:
                raise InvalidRequestError(f"{name} has no sample {index!r}")
            case 422:
                raise InvalidRequestError(f"{self._http.url} refuses sample {index!r}: {reply.detail}")
            case _:
                raise InfrastructureError(f"{self._http.url} could not start: {reply.status} {reply.detail}")

    async def interact(self, session: Session, content: str) -> Turn:
        body = Interact(session_id=int(session), agent_response=AgentResponse(content=content)).model_dump()
        reply = await self._http.take_turn("interact", self._config.step_timeout_s, body, _is_busy)
        if reply.status == 200:
            return _turn(_output(reply))
        if reply.status in CONTENT_REFUSED:
            raise ContentRefusedError(f"{self._http.url} refuses the action: {reply.status} {reply.detail}")
        if reply.status == 501 and self._config.release_leaked_slots:
            self._free_slot_of(session)
        raise EpisodeLostError(f"{self._http.url} ended session {session}: {reply.status} {reply.detail}")

    async def cancel(self, session: Session) -> None:
        await self._http.cancel("cancel", CancelSession(session_id=int(session)).model_dump())

    async def close(self) -> None:
        await self._tasks.close()

    async def _task_name(self) -> str:
        if not self._name:
            names = list((await self._http.ask("list_workers")).json or ())
            if not names:
                raise InfrastructureError(f"no worker has registered at {self._http.url} yet")
            if len(names) > 1:
                raise ConfigError(f"{self._http.url} has the tasks {', '.join(names)}: name one in the config (`task`)")
            (self._name,) = names
        return self._name

    def _opening(self, reply: Reply) -> Opening:
        output = _output(reply)
        session = cast(SessionAnswer, reply.json).get("session_id")
        if not isinstance(session, int):
            raise InfrastructureError(f"{self._http.url} names no session by a number: {reply.text:.120}")
        if output["status"] != _RUNNING:
            raise InfrastructureError(f"session {session} ended before its first turn: {output['status']}")
        return Opening(session=session, messages=chat(output.get("history")))

    def _free_slot_of(self, session: Session) -> None:
        self._leaked.add(str(session))
        if self._syncing is None or self._syncing.done():
            self._syncing = self._tasks.start(self._sync(), "synchronise an AgentBench controller")

    async def _sync(self) -> None:
        """Synchronise until the controller has dropped leaked sessions: a synchronisation fails while a session ends."""
        for _, pause_s in zip(range(_SYNC_ATTEMPTS), backoff(first_s=0.5), strict=False):
            try:
                await self._http.post("sync_all", _SYNC_S)
                listed = (await self._http.ask("list_sessions")).json
            except (UnansweredError, InfrastructureError) as error:
                log.warning("agentbench.sync_failed", error=str(error))
            else:
                self._leaked &= set(listed) if isinstance(listed, dict) else set()
            if not self._leaked:
                return
            await asyncio.sleep(pause_s)
        log.warning("agentbench.slots_leaked", sessions=sorted(self._leaked))
        self._leaked.clear()


def _is_busy(reply: Reply) -> bool:
    return reply.status == 500 or (reply.status == 400 and _BUSY_400 in reply.detail)


def _output(reply: Reply) -> SampleOutput:
    body = reply.json
    output = body.get("output") if isinstance(body, dict) else None
    if not isinstance(output, dict) or "status" not in output:
        raise EpisodeLostError(f"the controller's answer has no output: {reply.text:.120}")
    return cast(SampleOutput, output)


def _turn(output: SampleOutput) -> Turn:
    if output["status"] == _RUNNING:
        return Turn(text=chat(output.get("history"))[-1]["content"])
    status = end_status(output["status"])
    return Turn(done=True, reward=reward_of(output.get("result"), status), status=status)
