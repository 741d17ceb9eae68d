"""The gateway's episodes for trainers that play AgentBench's task servers: the adapter's protocol over HTTP.

Invariants
- One turn at a time: another one meanwhile is refused, never interleaved.
- A turn that failed for infrastructure is tried again; after repeated failures, or the loss of the episode, the
  episode is over and has no reward.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError

from extras.worlds.settings import ServedTaskConfig, TaskServerConfig
from services.common.aio import backoff
from services.common.errors import (
    CapacityError,
    ConfigError,
    EpisodeNotFoundError,
    InfrastructureError,
    InvalidRequestError,
    NotFoundError,
    RollmillError,
    StateError,
    UnknownEnvironmentError,
)
from services.common.http import Handler, Listener, json_answer
from services.envgateway.envs.base import EndStatus, StepResult
from services.envgateway.envs.episodes import EnvironmentRegistry, EpisodeManager

Body = TypeVar("Body", bound=BaseModel)

PREFIX = "/api"
BODY_BYTES = 16 << 20  # of the largest request
_ATTEMPTS = 3  # of a turn: clients of HTTP repeat no request
_STATUS = {InvalidRequestError: 400, NotFoundError: 404, StateError: 409, CapacityError: 503, RollmillError: 500}


class StartEpisode(BaseModel):
    sample_id: int | str


class NamedEpisode(BaseModel):
    episode_id: str


class TextAction(BaseModel):
    content: str


class StepEpisode(NamedEpisode):
    action: TextAction


@dataclass(slots=True, eq=False)
class Conversation:
    """An episode as its client sees it."""

    task: str
    turn: int = 0
    reward: float = 0.0  # of all turns together
    busy: bool = False


class TaskServer:
    """``start`` serves, ``stop`` ends. Raises ``ConfigError`` for settings that cannot work."""

    def __init__(
        self, config: TaskServerConfig, host: str, episodes: EpisodeManager, environments: EnvironmentRegistry
    ) -> None:
        assert config.port is not None
        served = config.environments or dict.fromkeys(environments.names_with_indices, ServedTaskConfig())
        if not served:
            absent = "".join(f"\n  {name}: {why}" for name, why in environments.absent.items())
            raise ConfigError(
                "envgateway.task_server has no environment to serve: name an environment under "
                f"envgateway.task_server.environments, or set up one of these:{absent}"
            )
        for name, task in served.items():
            try:
                environments.require(task.environment or name)
            except UnknownEnvironmentError as error:
                raise ConfigError(f"envgateway.task_server.environments.{name}: {error.message}") from error
        self._tasks = served
        self._episodes = episodes
        self._live: dict[str, Conversation] = {}  # by the id of the episode
        application = web.Application(client_max_size=BODY_BYTES)
        for base in (PREFIX, f"{PREFIX}/{{task}}"):
            application.add_routes([
                web.get(f"{base}/task/info", _answered(self._info)),
                web.get(f"{base}/health", _answered(self._health)),
                web.post(f"{base}/episode/start", _answered(self._start)),
                web.post(f"{base}/episode/step", _answered(self._step)),
                web.post(f"{base}/episode/cancel", _answered(self._cancel)),
            ])  # fmt: skip
        # A client that leaves ends no episode: its turn is taken once, even if no client reads the result.
        self._listener = Listener(
            application, host, config.port,
            name="the task server", setting="envgateway.task_server.port", group="task_server", leaving_cancels=False,
        )  # fmt: skip

    @property
    def port(self) -> int:
        return self._listener.port

    @property
    def routes(self) -> list[tuple[str, str]]:
        """Method and path of everything that is served."""
        return self._listener.routes

    @property
    def num_live(self) -> int:
        self._forget_expired()
        return len(self._live)

    async def start(self) -> int:
        """Returns the port."""
        return await self._listener.start()

    async def stop(self) -> None:
        """The gateway closes the episodes."""
        await self._listener.stop()

    def _task(self, request: web.Request) -> str:
        """The task in the path; without one, the first."""
        name = request.match_info.get("task", next(iter(self._tasks)))
        if name not in self._tasks:
            raise NotFoundError(f"no task {name!r}")
        return name

    def _forget_expired(self) -> None:
        for name in [name for name in self._live if not self._episodes.is_live(name)]:
            del self._live[name]

    async def _info(self, request: web.Request) -> object:
        name = self._task(request)
        task = self._tasks[name]
        settings = task.row.get("environment")
        return {
            "name": name,
            "num_samples": task.end,
            "max_episode_length": settings.get("max_turns") if isinstance(settings, dict) else None,
            "observation_type": "text",
            "action_type": "text",
            "description": f"the environment {task.environment or name} of a Rollmill gateway",
        }

    async def _health(self, request: web.Request) -> object:
        name = self._task(request)
        self._forget_expired()
        active = sum(one.task == name for one in self._live.values())
        return {"status": "healthy", "active_episodes": active, "task_name": name}

    async def _start(self, request: web.Request) -> object:
        name, body = self._task(request), await _read(request, StartEpisode)
        task, index = self._tasks[name], body.sample_id
        if isinstance(index, str) and re.fullmatch("[0-9]{1,18}", index):  # some clients write numbers as text
            index = int(index)
        if task.end is not None and not (isinstance(index, int) and 0 <= index < task.end):
            raise NotFoundError(f"no sample {body.sample_id!r} in {name}, which has {task.end}")
        seed = index if isinstance(index, int) else 0
        start = await self._episodes.create("", task.environment or name, {**task.row, "index": index}, seed)
        self._forget_expired()
        self._live[start.episode_id] = Conversation(name)
        first = start.observation
        messages = [
            {"role": "agent" if one["role"] == "assistant" else one["role"], "content": one["content"]}
            for one in first.messages or ({"role": "user", "content": first.text},)
        ]
        return {
            "episode_id": start.episode_id,
            "observation": {"type": "messages", "content": messages},
            "reward": 0.0,
            "done": False,
            "info": {"turn": 0, "status": "SampleStatus.RUNNING"},
        }

    async def _step(self, request: web.Request) -> object:
        """The agent's turn, and the environment's answer to it."""
        body = await _read(request, StepEpisode)
        one = self._found(body)
        if one.busy:
            raise StateError(f"episode {body.episode_id} is busy: its last turn is not over")
        one.busy = True
        try:
            result = await self._turn(body.episode_id, one.turn + 1, body.action.content)
        except RollmillError:
            await self._end(body)
            raise
        finally:
            one.busy = False
        one.turn += 1
        one.reward += result.reward
        info: dict[str, Any] = {"turn": one.turn, "status": "SampleStatus.RUNNING"}
        if result.done:
            await self._end(body)
            status = (result.status or EndStatus.COMPLETED).upper().replace(" ", "_")
            info |= {
                "status": f"SampleStatus.{status}",
                "success": one.reward > 0,
                "metrics": dict(result.metrics),
            }
        return {
            "episode_id": body.episode_id,
            "observation": None if result.done else {"type": "text", "content": result.observation},
            "reward": one.reward if result.done else 0.0,
            "done": result.done,
            "info": info,
        }

    async def _cancel(self, request: web.Request) -> object:
        body = await _read(request, NamedEpisode)
        self._found(body)
        await self._end(body)
        return {"status": "cancelled", "episode_id": body.episode_id}

    async def _turn(self, episode_id: str, turn: int, content: str) -> StepResult:
        failure: InfrastructureError | None = None
        for _, pause_s in zip(range(_ATTEMPTS), backoff(), strict=False):
            try:
                return await self._episodes.step(episode_id, turn, content)
            except EpisodeNotFoundError:
                if failure is not None:
                    raise failure from None  # the reason of the loss of the episode
                raise
            except InfrastructureError as error:
                failure = error
                await asyncio.sleep(pause_s)
        assert failure is not None
        raise failure

    def _found(self, body: NamedEpisode) -> Conversation:
        self._forget_expired()
        if body.episode_id not in self._live:
            raise NotFoundError(f"no episode {body.episode_id}: it never began, or it has ended")
        return self._live[body.episode_id]

    async def _end(self, body: NamedEpisode) -> None:
        self._live.pop(body.episode_id, None)
        await self._episodes.close(body.episode_id)


def _answered(handle: Callable[[web.Request], Awaitable[object]]) -> Handler:
    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            return json_answer(await handle(request))
        except ValidationError as error:
            problems = error.errors(include_url=False, include_input=False, include_context=False)
            detail = [{"loc": ["body", *p["loc"]], "msg": p["msg"], "type": p["type"]} for p in problems]
            return json_answer({"detail": detail}, 422)
        except RollmillError as error:
            status = next(status for kind, status in _STATUS.items() if isinstance(error, kind))
            return json_answer({"detail": error.message}, status)

    return answer


async def _read(request: web.Request, model: type[Body]) -> Body:
    """Raises ``ValidationError``, which names the field."""
    return model.model_validate_json(await request.read())
