"""The protocol of task-server adapters: one conversation as an episode, named by a uuid.

    GET  task/info, health
    POST episode/start, episode/step, episode/cancel

under /api for the first task, and under /api/NAME for each. An episode takes one step at a time: another is answered 409.
"""

from __future__ import annotations

from aiohttp import web

from services.common.errors import (
    CapacityError,
    InvalidRequestError,
    NotFoundError,
    RollmillError,
    StateError,
)
from services.envgateway.envs.agentbench.messages import (
    CancelEpisode,
    EpisodeAnswer,
    EpisodeInfo,
    EpisodeObservation,
    StartEpisode,
    StepEpisode,
    TaskInfo,
)
from services.envgateway.taskserver.answers import Refusal, answered, read
from services.envgateway.taskserver.conversations import RUNNING, Conversation, Conversations
from services.envgateway.taskserver.tasks import Task, Tasks


class AdapterProtocol:
    def __init__(self, tasks: Tasks, conversations: Conversations) -> None:
        self._tasks = tasks
        self._conversations = conversations

    def routes(self, prefix: str) -> list[web.RouteDef]:
        routes: list[web.RouteDef] = []
        for base in (prefix, f"{prefix}/{{task}}"):
            routes += [
                web.get(f"{base}/task/info", answered(self._info, _refusal)),
                web.get(f"{base}/health", answered(self._health, _refusal)),
                web.post(f"{base}/episode/start", answered(self._start, _refusal)),
                web.post(f"{base}/episode/step", answered(self._step, _refusal)),
                web.post(f"{base}/episode/cancel", answered(self._cancel, _refusal)),
            ]
        return routes

    def _task(self, request: web.Request) -> Task:
        name = request.match_info.get("task")
        if name is None:
            return self._tasks.all[0]
        task = self._tasks.find(name)
        if task is None:
            raise Refusal(404, f"no task {name!r}")
        return task

    async def _info(self, request: web.Request) -> TaskInfo:
        task = self._task(request)
        return {
            "name": task.name,
            "num_samples": len(await self._tasks.indices(task)),
            "max_episode_length": self._tasks.max_turns(task),
            "observation_type": "text",
            "action_type": "text",
            "description": f"the environment {task.environment} of a Rollmill gateway",
        }

    async def _health(self, request: web.Request) -> object:
        task = self._task(request)
        return {"status": "healthy", "active_episodes": self._conversations.num_taken(task), "task_name": task.name}

    async def _start(self, request: web.Request) -> object:
        task, body = self._task(request), await read(request, StartEpisode)
        index = await self._tasks.index(task, body.sample_id)
        if index is None:
            raise Refusal(404, f"no sample {body.sample_id!r} in {task.name}")
        one = await self._conversations.start(task, index)
        return _answer(one, {"type": "messages", "content": one.history})

    async def _step(self, request: web.Request) -> object:
        body = await read(request, StepEpisode)
        one = self._conversations.by_uuid(body.episode_id)
        await self._conversations.say(one, body.action.content)
        if one.status == RUNNING:
            return _answer(one, {"type": "text", "content": one.history[-1]["content"]})
        return _answer(one, None)

    async def _cancel(self, request: web.Request) -> object:
        body = await read(request, CancelEpisode)
        await self._conversations.end(self._conversations.by_uuid(body.episode_id))
        return {"status": "cancelled", "episode_id": body.episode_id}


def _answer(one: Conversation, observation: EpisodeObservation | None) -> EpisodeAnswer:
    done = one.status != RUNNING
    info: EpisodeInfo = {"turn": one.turn, "status": f"SampleStatus.{one.status.upper().replace(' ', '_')}"}
    if done:
        info["success"] = one.reward > 0
        info["metrics"] = dict(one.metrics)
    return {
        "episode_id": one.uuid,
        "observation": observation,
        "reward": one.reward if done else 0.0,
        "done": done,
        "info": info,
    }


_STATUS = {InvalidRequestError: 400, NotFoundError: 404, StateError: 409, CapacityError: 503}


def _refusal(error: RollmillError) -> Refusal:
    status = next((status for kind, status in _STATUS.items() if isinstance(error, kind)), 500)
    return Refusal(status, error.message)
