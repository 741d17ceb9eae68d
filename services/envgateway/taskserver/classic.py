"""The protocol of AgentBench's classic controller: sessions by number, the whole history in every answer.

    GET  get_indices?name=, list_workers, list_sessions
    POST start_sample, interact, cancel, calculate_overall, cancel_all, sync_all, clean_worker, clean_session

under /api. Every task has one worker, the gateway itself, which is always alive. A session takes one turn at a time: another
is answered at once with a plain 500, as the real controller answers after a second. A cancel ends a session even then.
"""

from __future__ import annotations

import time
from typing import Any

from aiohttp import web
from pydantic import BaseModel, FiniteFloat, field_validator

from services.common.errors import CapacityError, InvalidRequestError, NotFoundError, RollmillError, StateError
from services.envgateway.envs.agentbench.messages import (
    CancelSession,
    Interact,
    SampleOutput,
    SessionAnswer,
    StartSample,
)
from services.envgateway.envs.base import EndStatus
from services.envgateway.taskserver.answers import Refusal, answered, read
from services.envgateway.taskserver.conversations import RUNNING, Conversation, Conversations, cut
from services.envgateway.taskserver.tasks import Task, Tasks

_WORKER = 0
_ALIVE = 0
_TASK_ERROR = "task error"


class Result(BaseModel):
    reward: FiniteFloat = 0.0


class Output(BaseModel):
    result: Result | None = None

    @field_validator("result", mode="before")
    @classmethod
    def _without_a_reward(cls, given: Any) -> Any:
        """A failed sample's description of itself is text."""
        return given if isinstance(given, dict) else None


class OverallBody(BaseModel):
    name: str
    results: list[Output]


class ClassicProtocol:
    def __init__(self, tasks: Tasks, conversations: Conversations) -> None:
        self._tasks = tasks
        self._conversations = conversations

    def routes(self, prefix: str) -> list[web.RouteDef]:
        get = {
            "get_indices": self._get_indices,
            "list_workers": self._list_workers,
            "list_sessions": self._list_sessions,
        }
        post = {
            "start_sample": self._start_sample,
            "interact": self._interact,
            "cancel": self._cancel,
            "calculate_overall": self._calculate_overall,
            "cancel_all": self._cancel_all,
            "clean_session": self._clean_session,
            "sync_all": self._acknowledge,
            "clean_worker": self._acknowledge,
        }
        return [
            *(web.get(f"{prefix}/{name}", answered(handle, _refusal)) for name, handle in get.items()),
            *(web.post(f"{prefix}/{name}", answered(handle, _refusal)) for name, handle in post.items()),
        ]

    async def _get_indices(self, request: web.Request) -> object:
        name = request.query.get("name")
        if name is None:
            detail = {"loc": ["query", "name"], "msg": "field required", "type": "value_error.missing"}
            raise Refusal(422, [detail])
        return list(await self._tasks.indices(self._task(name, missing=400)))

    async def _list_workers(self, request: web.Request) -> object:
        return {task.name: await self._listed(task, request) for task in self._tasks.all}

    async def _listed(self, task: Task, request: web.Request) -> dict[str, Any]:
        worker = {
            "id": _WORKER,
            "address": f"http://{request.host}/api",
            "capacity": task.config.concurrency,
            "current": self._conversations.num_taken(task),
            "last_visit": time.time(),
            "status": _ALIVE,
            "locked": False,
        }
        return {"indices": list(await self._tasks.indices(task)), "workers": {str(_WORKER): worker}}

    async def _list_sessions(self, request: web.Request) -> object:
        return {
            str(one.number): {
                "name": one.task.name,
                "index": one.index,
                "start": one.started,
                "last_update": one.last_update,
                "worker_id": _WORKER,
                "locked": one.busy,
            }
            for one in self._conversations.all
        }

    async def _start_sample(self, request: web.Request) -> object:
        body = await read(request, StartSample)
        task = self._task(body.name, missing=406)
        index = await self._tasks.index(task, body.index)
        if index is None:
            raise Refusal(400, "Error: Index out of bounds")
        return _answer(await self._conversations.start(task, index))

    async def _interact(self, request: web.Request) -> object:
        body = await read(request, Interact)
        one = self._conversations.by_number(body.session_id)
        response = body.agent_response
        if response.status == "cancelled":
            await self._conversations.end(one)
        elif response.status == "agent context limit":
            await self._conversations.end(one, EndStatus.CONTEXT_LIMIT)
        else:
            await self._say(one, response.content or "")
        return _answer(one)

    async def _say(self, one: Conversation, content: str) -> None:
        try:
            await self._conversations.say(one, content)
        except (StateError, NotFoundError):
            raise
        except RollmillError as error:
            output: SampleOutput = {**_output(one), "index": one.index, "status": _TASK_ERROR, "result": error.message}
            raise Refusal(501, {"session_id": one.number, "output": output}) from error

    async def _cancel(self, request: web.Request) -> object:
        body = await read(request, CancelSession)
        await self._conversations.end(self._conversations.by_number(body.session_id))
        return {"session_id": body.session_id}

    async def _calculate_overall(self, request: web.Request) -> object:
        body = await read(request, OverallBody)
        self._task(body.name, missing=400)
        return overall([output.result.reward for output in body.results if output.result is not None])

    async def _cancel_all(self, request: web.Request) -> object:
        await self._conversations.end_all()
        return None

    async def _clean_session(self, request: web.Request) -> object:
        await self._conversations.expire()
        return None

    async def _acknowledge(self, request: web.Request) -> object:
        """There is no worker that could be out of step."""
        return None

    def _task(self, name: str, *, missing: int) -> Task:
        task = self._tasks.find(name)
        if task is None:
            raise Refusal(missing, "Error: Task does not exist")
        return task


def overall(rewards: list[float]) -> dict[str, Any]:
    """Mean reward, and the number of samples with the full reward."""
    passed = sum(reward >= 1.0 for reward in rewards)
    return {
        "reward": sum(rewards) / len(rewards) if rewards else 0.0,
        "overall": {
            "total": len(rewards),
            "pass": passed,
            "wrong": len(rewards) - passed,
            "success_rate": passed / len(rewards) if rewards else 0.0,
        },
    }


def _answer(one: Conversation) -> SessionAnswer:
    return {"session_id": one.number, "output": _output(one)}


def _output(one: Conversation) -> SampleOutput:
    if one.status == RUNNING:
        return {"index": None, "status": RUNNING, "result": None, "history": cut(one.history)}
    result = {"reward": one.reward, "result": one.reward, "turns": one.turn, "metrics": dict(one.metrics)}
    return {"index": one.index, "status": one.status, "result": result, "history": one.history}


_STATUS = {CapacityError: 406, InvalidRequestError: 400, NotFoundError: 400}


def _refusal(error: RollmillError) -> Refusal:
    if isinstance(error, StateError):
        return Refusal(500, error.message, plain=True)
    status = next((status for kind, status in _STATUS.items() if isinstance(error, kind)), 501)
    return Refusal(status, f"Error: {error.message}")
