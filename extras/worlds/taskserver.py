"""Episodes as conversations: messages of both sides, one turn at a time, until one side ends the conversation.

Invariants
- A place is taken from the start of a conversation to its end, for any kind of end.
- One turn at a time: another one meanwhile is refused, never interleaved.
- A turn that failed for infrastructure is tried again; after repeated failures, or the loss of the episode, the
  conversation is over and has no reward.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import orjson
import structlog
from aiohttp import web
from pydantic import BaseModel, FiniteFloat, ValidationError, field_validator

from extras.worlds.agentbench import (
    CancelEpisode,
    CancelSession,
    EpisodeAnswer,
    EpisodeInfo,
    EpisodeObservation,
    Index,
    Interact,
    SampleOutput,
    SessionAnswer,
    StartEpisode,
    StartSample,
    StepEpisode,
    TaskInfo,
)
from services.common.aio import TaskOwner, backoff
from services.common.config.envgateway import ServedTaskConfig, TaskServerConfig
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
from services.common.http import Handler, Listener
from services.common.text.encodable import encodable
from services.envgateway.envs.base import EndStatus, Observation, StepResult
from services.envgateway.envs.episodes import LONGEST_SWEEP_PAUSE_S, EnvironmentRegistry, EpisodeManager

# --- Served tasks: a name for clients, an environment of the gateway, indices, and their rows.


@dataclass(frozen=True, slots=True)
class Task:
    name: str
    environment: str
    config: ServedTaskConfig

    def row(self, index: Index) -> dict[str, Any]:
        return {**self.config.row, "index": index}


class Tasks:
    """Raises ``ConfigError`` for an environment that the gateway does not have."""

    def __init__(self, config: TaskServerConfig, environments: EnvironmentRegistry) -> None:
        served = config.environments or dict.fromkeys(environments.names_with_indices, ServedTaskConfig())
        self._environments = environments
        self._by_name: dict[str, Task] = {}
        self._indices: dict[str, Sequence[Index]] = {}
        self._known: dict[str, frozenset[Index]] = {}
        for name, one in served.items():
            environment = one.environment or name
            where = f"envgateway.task_server.environments.{name}"
            try:
                environments.require(environment)
            except UnknownEnvironmentError as error:
                raise ConfigError(f"{where}: {error.message}") from error
            if one.end is None and environment not in environments.names_with_indices:
                raise ConfigError(f"{where}: {environment!r} cannot list its tasks; say how many there are with `end`")
            self._by_name[name] = Task(name, environment, one)

    @property
    def all(self) -> list[Task]:
        return list(self._by_name.values())

    def find(self, name: str) -> Task | None:
        return self._by_name.get(name)

    def max_turns(self, task: Task) -> int | None:
        """Turns of an episode, where the row or the environment has the number."""
        settings = task.config.row.get("environment")
        in_row = settings.get("max_turns") if isinstance(settings, dict) else None
        return self._environments.max_turns(task.environment) if in_row is None else in_row

    async def indices(self, task: Task) -> Sequence[Index]:
        """Valid values of ``index``, in order. Raises the errors of loading the environment, and ``ConfigError`` for
        fewer tasks than the config's ``end``."""
        if task.name not in self._indices:
            everything = await self._environments.indices(task.environment)
            if everything is None:
                everything = range(task.config.end or 0)
            if task.config.end is not None and task.config.end > len(everything):
                raise ConfigError(
                    f"the environment {task.environment!r} holds {len(everything)} tasks; "
                    f"envgateway.task_server.environments.{task.name}.end is {task.config.end}"
                )
            self._indices[task.name] = everything[task.config.first : task.config.end]
            self._known[task.name] = frozenset(self._indices[task.name])
        return self._indices[task.name]

    async def index(self, task: Task, given: Index) -> Index | None:
        """The index that a client means; None when there is none. Digits stand for a number where indices are numbers.

        Raises ``InvalidRequestError`` for text that is no number where they are.
        """
        indices = await self.indices(task)
        if indices and isinstance(indices[0], int) and isinstance(given, str):
            try:
                given = int(given)
            except ValueError as error:
                raise InvalidRequestError(f"the index {given!r} is no number") from error
        return given if given in self._known[task.name] else None


log = structlog.get_logger()


Message = dict[str, str]  # role (user, agent), content
_MOST_PIECES = 3500
_LETTERS_A_PIECE = 7
_PIECE = re.compile(r"[^\W\d_]+|[^ \n]")


def num_pieces(text: str, most: int) -> int:
    """About the number of tokens: every seven letters of a word one, every other character one.

    Counts no further than ``most``: a turn may have megabytes.
    """
    pieces = 0
    for found in _PIECE.finditer(text):
        piece = found[0]
        pieces += -(-len(piece) // _LETTERS_A_PIECE) if piece[0].isalpha() else 1
        if pieces >= most:
            break
    return pieces


def cut(messages: Sequence[Message], most: int = _MOST_PIECES) -> list[Message]:
    """The first message, and the newest others that fit; the first names the number of those left out."""
    first, others = messages[0], messages[1:]
    pieces, kept = num_pieces(first["content"], most), 0
    for message in reversed(others):
        pieces += num_pieces(message["content"], most)
        if pieces >= most:
            break
        kept += 1
    if kept and others[-kept]["role"] == first["role"]:
        kept -= 1  # the first message is a user's: an agent's comes next
    omitted = len(others) - kept
    if omitted:
        first = {**first, "content": f"{first['content']}\n\n[NOTICE] {omitted} messages are omitted."}
    return [first, *others[len(others) - kept :]]


RUNNING = "running"
CANCELLED = "unknown"  # AgentBench has no such status
_ATTEMPTS = 3
_ROLES = {"assistant": "agent"}  # all other roles are unchanged


@dataclass(slots=True, eq=False)
class Conversation:
    number: int
    uuid: str
    task: Task
    index: Index
    episode_id: str
    history: list[Message]
    remembered: str  # replaces its last message when there is a newer one; empty: the message stays
    started: float = field(default_factory=time.time)  # seconds since 1970
    last_update: float = field(default_factory=time.time)
    turn: int = 0
    reward: float = 0.0  # of all turns together
    status: str = RUNNING
    metrics: Mapping[str, float] = field(default_factory=dict)
    busy: bool = False


class Conversations:
    """Holds all live conversations. ``expire_forever`` runs in a task and ends those without new turns."""

    def __init__(self, episodes: EpisodeManager, *, idle_s: float) -> None:
        self._episodes = episodes
        self._idle_s = idle_s
        self._numbers = itertools.count()
        self._by_number: dict[int, Conversation] = {}
        self._by_uuid: dict[str, Conversation] = {}
        self._taken: Counter[str] = Counter()  # places by task name

    @property
    def all(self) -> list[Conversation]:
        return list(self._by_number.values())

    def num_taken(self, task: Task) -> int:
        """Places taken, also by conversations that are just beginning."""
        return self._taken[task.name]

    def by_number(self, number: int) -> Conversation:
        """Raises ``NotFoundError``."""
        return _found(self._by_number.get(number), number)

    def by_uuid(self, name: str) -> Conversation:
        """Raises ``NotFoundError``."""
        return _found(self._by_uuid.get(name), name)

    async def start(self, task: Task, index: Index) -> Conversation:
        """Begin one; its history ends with the first turn of the environment.

        Raises:
            CapacityError: the task, or the gateway, has no place.
            RollmillError: told by the environment.
        """
        if self._taken[task.name] >= task.config.concurrency:
            raise CapacityError(f"{task.config.concurrency} conversations of {task.name} are going on")
        self._taken[task.name] += 1
        try:
            seed = index if isinstance(index, int) else 0
            start = await self._episodes.create("", task.environment, task.row(index), seed)
        except BaseException:
            self._taken[task.name] -= 1
            raise
        history = _opening(start.observation)
        one = Conversation(
            next(self._numbers), str(uuid.uuid4()), task, index, start.episode_id, history, start.observation.remembered
        )
        self._by_number[one.number] = self._by_uuid[one.uuid] = one
        return one

    async def say(self, one: Conversation, content: str) -> None:
        """The agent's turn, and the environment's answer to it.

        Raises:
            StateError: a turn is being taken.
            NotFoundError: the conversation has ended meanwhile.
            InfrastructureError: the conversation is over, without a reward.
        """
        if one.busy:
            raise StateError(f"session {one.number} is busy: its last turn is not over")
        one.busy, one.last_update = True, time.time()
        try:
            result = await self._take_turn(one, content)
        except RollmillError:
            await self.end(one)
            raise
        finally:
            one.busy, one.last_update = False, time.time()
        one.turn += 1
        one.reward += result.reward
        one.metrics = result.metrics
        if one.remembered:
            one.history[-1] = {**one.history[-1], "content": one.remembered}
        one.remembered = result.remembered
        one.history.append({"role": "agent", "content": content})
        if result.done:
            await self.end(one, result.status or EndStatus.COMPLETED)
        else:
            one.history.append({"role": "user", "content": result.observation})

    async def end(self, one: Conversation, status: str = CANCELLED) -> None:
        """Over; a turn that is being taken is lost."""
        if self._by_number.pop(one.number, None) is None:
            return
        del self._by_uuid[one.uuid]
        self._taken[one.task.name] -= 1
        one.status = status
        await self._episodes.close(one.episode_id)

    async def end_all(self) -> None:
        for one in self.all:
            await self.end(one)

    async def expire_forever(self) -> None:
        """Ends by cancellation."""
        while True:
            await asyncio.sleep(min(LONGEST_SWEEP_PAUSE_S, self._idle_s / 4))
            await self.expire()

    async def expire(self) -> None:
        """End those that have been silent for too long; their episodes have expired, too."""
        oldest = time.time() - self._idle_s
        overdue = [one for one in self.all if not one.busy and one.last_update < oldest]
        for one in overdue:
            await self.end(one)
        if overdue:
            log.info("taskserver.expired", conversations=len(overdue))

    async def _take_turn(self, one: Conversation, content: str) -> StepResult:
        """Take a turn, and repeat a turn that failed for infrastructure: HTTP's clients repeat no request."""
        failure: InfrastructureError | None = None
        for _, pause_s in zip(range(_ATTEMPTS), backoff(), strict=False):
            try:
                return await self._episodes.step(one.episode_id, one.turn + 1, content)
            except EpisodeNotFoundError:
                if failure is not None:
                    raise failure from None  # the reason of the loss of the episode
                raise
            except InfrastructureError as error:
                failure = error
                await asyncio.sleep(pause_s)
        assert failure is not None
        raise failure


def _found(one: Conversation | None, name: object) -> Conversation:
    if one is None:
        raise NotFoundError(f"no conversation {name}: it never began, or it has ended")
    return one


def _opening(observation: Observation) -> list[Message]:
    messages = observation.messages or ({"role": "user", "content": observation.text},)
    return [{"role": _ROLES.get(m["role"], m["role"]), "content": m["content"]} for m in messages]


# --- Reading requests and writing answers: JSON both ways, with the error bodies that AgentBench's clients know.


Body = TypeVar("Body", bound=BaseModel)


class Refusal(Exception):
    """An answer that is no success; ``plain`` is text instead of JSON."""

    def __init__(self, status: int, detail: Any, *, plain: bool = False) -> None:
        super().__init__(f"{status}: {detail}")
        self.status = status
        self.detail = detail
        self.plain = plain


def answered(
    handle: Callable[[web.Request], Awaitable[object]], refusal_of: Callable[[RollmillError], Refusal]
) -> Handler:
    """Wraps a handler that returns a value for JSON, or raises ``Refusal`` or an error that ``refusal_of`` translates."""

    async def wrapped(request: web.Request) -> web.StreamResponse:
        try:
            return _json(await handle(request), 200)
        except (Refusal, RollmillError) as error:
            refusal = error if isinstance(error, Refusal) else refusal_of(error)
            if refusal.plain:
                return web.Response(text=str(refusal.detail), status=refusal.status)
            return _json({"detail": refusal.detail}, refusal.status)

    return wrapped


async def read(request: web.Request, model: type[Body]) -> Body:
    """Raises ``Refusal`` 422, which names the field."""
    try:
        return model.model_validate_json(await request.read())
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False, include_context=False)
        detail = [{"loc": ["body", *p["loc"]], "msg": p["msg"], "type": p["type"]} for p in problems]
        raise Refusal(422, detail) from None


def _json(value: object, status: int) -> web.Response:
    body = orjson.dumps(encodable(value), option=orjson.OPT_NON_STR_KEYS)
    return web.Response(body=body, status=status, content_type="application/json")


# --- The protocol of task-server adapters: one conversation as an episode, named by a uuid.


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


# --- The protocol of AgentBench's classic controller: sessions by number, the whole history in every answer.


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
            *(web.get(f"{prefix}/{name}", answered(handle, _classic_refusal)) for name, handle in get.items()),
            *(web.post(f"{prefix}/{name}", answered(handle, _classic_refusal)) for name, handle in post.items()),
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
        return _classic_answer(await self._conversations.start(task, index))

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
        return _classic_answer(one)

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


def _classic_answer(one: Conversation) -> SessionAnswer:
    return {"session_id": one.number, "output": _output(one)}


def _output(one: Conversation) -> SampleOutput:
    if one.status == RUNNING:
        return {"index": None, "status": RUNNING, "result": None, "history": cut(one.history)}
    result = {"reward": one.reward, "result": one.reward, "turns": one.turn, "metrics": dict(one.metrics)}
    return {"index": one.index, "status": one.status, "result": result, "history": one.history}


_CLASSIC_STATUS = {CapacityError: 406, InvalidRequestError: 400, NotFoundError: 400}


def _classic_refusal(error: RollmillError) -> Refusal:
    if isinstance(error, StateError):
        return Refusal(500, error.message, plain=True)
    status = next((status for kind, status in _CLASSIC_STATUS.items() if isinstance(error, kind)), 501)
    return Refusal(status, f"Error: {error.message}")


# --- The task server: both protocols of AgentBench on one port, over the gateway's episodes.


PREFIX = "/api"
BODY_BYTES = 16 << 20  # of the largest request


class TaskServer:
    """``start`` serves, ``stop`` ends. Raises ``ConfigError`` for settings that cannot work."""

    def __init__(
        self,
        config: TaskServerConfig,
        host: str,
        episodes: EpisodeManager,
        environments: EnvironmentRegistry,
        idle_s: float,
    ) -> None:
        """A conversation without a call for ``idle_s`` seconds ends."""
        assert config.port is not None
        tasks = Tasks(config, environments)
        if not tasks.all:
            absent = "".join(f"\n  {name}: {why}" for name, why in environments.absent.items())
            raise ConfigError(
                "envgateway.task_server has no environment to serve: name an environment under "
                f"envgateway.task_server.environments, or set up one of these:{absent}"
            )
        self.conversations = Conversations(episodes, idle_s=idle_s)
        self._tasks = TaskOwner()
        application = web.Application(client_max_size=BODY_BYTES)
        # First the names that are fixed, then those with a task in the path.
        application.add_routes(ClassicProtocol(tasks, self.conversations).routes(PREFIX))
        application.add_routes(AdapterProtocol(tasks, self.conversations).routes(PREFIX))
        # A client that leaves ends no conversation: its turn is taken once, even if no client reads the result.
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

    async def start(self) -> int:
        """Returns the port."""
        port = await self._listener.start()
        self._tasks.start(self.conversations.expire_forever(), "expire conversations")
        return port

    async def stop(self) -> None:
        await self._listener.stop()
        await self._tasks.close()
        await self.conversations.end_all()
