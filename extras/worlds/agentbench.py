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
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypedDict, cast

import aiohttp
import orjson
import structlog
from pydantic import BaseModel, model_validator

from services.common.aio import TaskOwner, backoff
from services.common.config.envgateway import AgentBenchConfig
from services.common.errors import CapacityError, ConfigError, InfrastructureError, InvalidRequestError
from services.envgateway.envs.base import EndStatus, EpisodeLostError, Observation, StepResult

# --- HTTP client with one request at a time per connection; says which failures mean that the server never saw the
# request.


log = structlog.get_logger()


_SHOWN_CHARS = 300


class UnansweredError(Exception):
    """The request was sent, and no answer came: the server may have carried out the request."""


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    text: str

    @property
    def json(self) -> Any:
        """The body as JSON; None for plain text."""
        try:
            return orjson.loads(self.text)
        except orjson.JSONDecodeError:
            return None

    @property
    def detail(self) -> str:
        """The error's text: FastAPI's ``detail``, the detail of the server behind a pool, or the body."""
        body = self.json
        while isinstance(body, dict):
            inner = next((body[key] for key in ("upstream_detail", "detail", "message") if key in body), None)
            if inner is None:
                break
            body = inner
        return (body if isinstance(body, str) else self.text).strip()[:_SHOWN_CHARS]


class HttpConnection:
    """HTTP client of one server. Each connection serves one request: these servers close idle ones without notice, and
    a request that meets the closing of its connection may or may not have been carried out."""

    def __init__(self, url: str, connections: int) -> None:
        self.url = url.rstrip("/")
        self._places = asyncio.Semaphore(connections)
        self._session: aiohttp.ClientSession | None = None

    async def get(self, path: str, timeout_s: float, **query: str) -> Reply:
        return await self._request("GET", path, timeout_s, params=query)

    async def post(self, path: str, timeout_s: float, body: object = None) -> Reply:
        return await self._request("POST", path, timeout_s, json=body)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def ask(self, path: str, **query: str) -> Reply:
        """Send a read-only request. Raises ``InfrastructureError`` when no answer comes."""
        try:
            return await self.get(path, _QUESTION_S, **query)
        except UnansweredError as error:
            raise InfrastructureError(str(error)) from error

    async def start(self, path: str, timeout_s: float, body: object) -> Reply:
        """Raises ``InfrastructureError``. The server collects a session whose start we did not hear of."""
        try:
            return await self.post(path, timeout_s, body)
        except UnansweredError as error:
            raise InfrastructureError(f"{error}: if it began, the server collects it") from error

    async def take_turn(self, path: str, timeout_s: float, body: object, is_busy: Callable[[Reply], bool]) -> Reply:
        """Ask until the server takes the turn, within the time of one.

        Raises:
            InfrastructureError: the server did not take the turn; the caller may repeat the turn.
            EpisodeLostError: the server may have taken the turn, but does not answer.
        """
        until = time.monotonic() + timeout_s
        left_s = timeout_s
        for pause_s in backoff(first_s=0.2, longest_s=2.0):
            try:
                reply = await self.post(path, left_s, body)
            except UnansweredError as error:
                raise EpisodeLostError(f"{error}: the turn may have been taken") from error
            if not is_busy(reply):
                return reply
            left_s = until - time.monotonic() - pause_s
            if left_s < _LEAST_S:
                break
            await asyncio.sleep(pause_s)
        raise InfrastructureError(f"{self.url} was busy with this session for {timeout_s:g} s")

    async def cancel(self, path: str, body: object) -> None:
        """End a session early. Failures are logged: the server collects sessions that remain."""
        try:
            reply = await self.post(path, _CANCEL_S, body)
        except (UnansweredError, InfrastructureError) as error:
            log.warning("agentbench.cancel_failed", error=str(error))
            return
        if reply.status != 200:
            log.info("agentbench.not_cancelled", status=reply.status, detail=reply.detail)

    async def _request(self, method: str, path: str, timeout_s: float, **content: Any) -> Reply:
        """Raises ``UnansweredError``, and ``InfrastructureError`` when the server cannot have seen the request."""
        what = f"{method} {self.url}/{path}"
        sent = False
        try:
            async with asyncio.timeout(timeout_s), self._places:
                sent = True
                async with self._opened().request(method, f"{self.url}/{path}", **content) as response:
                    return Reply(response.status, await response.text(errors="replace"))
        except TimeoutError:
            if not sent:
                raise InfrastructureError(f"{what}: no connection came free within {timeout_s:g} s") from None
            raise UnansweredError(f"{what}: no answer within {timeout_s:g} s") from None
        except aiohttp.ClientConnectorError as error:
            raise InfrastructureError(f"{what}: {error}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise UnansweredError(f"{what}: {type(error).__name__}: {error}") from error

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        return self._session


_CONNECTIONS = 256  # at once
_QUESTION_S = 10.0  # requests that start no session
_LEAST_S = 0.1  # with less, a server could take the turn and its answer come too late
_CANCEL_S = 4.5  # less than the gateway waits for an environment to close


# --- Bodies of requests and answers of AgentBench's two protocols, for our client of its servers and our server for its
# clients.


Index = int | str  # of a sample

# -- a task-server adapter: one conversation is an episode, named by a uuid ------------------------------------------


class StartEpisode(BaseModel):
    sample_id: Index
    config: dict[str, Any] | None = None


class TextAction(BaseModel):
    type: str = "text"
    content: str


class StepEpisode(BaseModel):
    episode_id: str
    action: TextAction


class CancelEpisode(BaseModel):
    episode_id: str


class TaskInfo(TypedDict, total=False):
    name: str
    num_samples: int
    max_episode_length: int | None
    observation_type: str
    action_type: str
    description: str


class EpisodeObservation(TypedDict, total=False):
    type: str  # "messages" at the start, then "text"
    content: Any


class EpisodeInfo(TypedDict, total=False):
    turn: int
    status: str
    success: bool
    metrics: dict[str, float]


class EpisodeAnswer(TypedDict, total=False):
    episode_id: str
    observation: EpisodeObservation | None
    reward: float
    done: bool
    info: EpisodeInfo


# -- the classic controller: sessions by number ----------------------------------------------------------------------


class StartSample(BaseModel):
    name: str
    index: Index


class AgentResponse(BaseModel):
    status: Literal["normal", "cancelled", "agent context limit"] = "normal"
    content: str | None = None

    @model_validator(mode="after")
    def _has_content(self) -> AgentResponse:
        if self.status == "normal" and self.content is None:
            raise ValueError("If status is NORMAL, content should not be None")
        return self


class Interact(BaseModel):
    session_id: int
    agent_response: AgentResponse


class CancelSession(BaseModel):
    session_id: int


class SampleOutput(TypedDict, total=False):
    index: Index | None
    status: str
    result: Any
    history: list[dict[str, str]]


class SessionAnswer(TypedDict, total=False):
    session_id: int
    output: SampleOutput


# --- Interface of an AgentBench server for both protocols, and the conversion of answers to our records.


Session = int | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """A session has begun."""

    session: Session
    messages: Sequence[Mapping[str, str]]  # role (user, assistant) and content; the last is the first turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The server's answer to a turn. The server forgets a session that is done."""

    text: str = ""
    done: bool = False
    reward: float = 0.0
    status: str = ""


class AgentBenchServer(Protocol):
    async def indices(self) -> Sequence[Index]: ...

    async def start(self, index: Index) -> Opening:
        """Raises ``CapacityError`` when there is no place, ``InvalidRequestError`` for an index that is none."""
        ...

    async def interact(self, session: Session, content: str) -> Turn: ...

    async def cancel(self, session: Session) -> None:
        """End a session early. Failures are logged: the server collects sessions that remain."""
        ...


class ContentRefusedError(EpisodeLostError):
    """The server refuses the content: the action is at fault. The session is over for us."""


CONTENT_REFUSED = (413, 422)  # too large: an answer outside of the protocol
_MOST_CHARS = 100_000  # of an action: far above any reply, far below the limits of servers


def sendable(action: str) -> str:
    """The action in a form that every server reads: no lone surrogates, no NUL, bounded length."""
    return action[:_MOST_CHARS].encode(errors="replace").decode().replace("\0", "\ufffd")


_ROLES = {"agent": "assistant"}


def chat(history: Any) -> list[dict[str, str]]:
    """AgentBench's history with the usual roles. Raises ``EpisodeLostError`` for any other value."""
    if not isinstance(history, list) or not history:
        raise EpisodeLostError(f"the server showed no conversation, but {history!r:.80}")
    try:
        return [{"role": _ROLES.get(m["role"], m["role"]), "content": str(m["content"])} for m in history]
    except (KeyError, TypeError) as error:
        raise EpisodeLostError(f"the server showed a conversation without roles: {error!r}") from error


def end_status(told: object) -> EndStatus:
    """``completed`` or ``SampleStatus.COMPLETED``. Raises ``EpisodeLostError`` for an end that the agent did not cause."""
    word = str(told).removeprefix("SampleStatus.").replace("_", " ").lower()
    try:
        return EndStatus(word)
    except ValueError:
        raise EpisodeLostError(f"the server ended the session with status {word!r}") from None


def reward_of(result: object, status: EndStatus) -> float:
    """The reward in a task's return value: ``result``, else ``reward``, or the number itself.

    A missing reward is 0 where the agent failed; a completed task without a reward raises ``EpisodeLostError``.
    """
    value = result
    if isinstance(result, Mapping):
        value = result.get("result")
        if value is None:
            value = result.get("reward")
    if isinstance(value, bool | int | float):
        return float(value)
    if value is None and status is not EndStatus.COMPLETED:
        return 0.0
    raise EpisodeLostError(f"the task was completed with a result that holds no reward: {result!r:.120}")


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
        reply = await self._http.take_turn("interact", self._config.step_timeout_s, body, _classic_is_busy)
        if reply.status == 200:
            return _turn(_output(reply))
        if reply.status in CONTENT_REFUSED:
            raise ContentRefusedError(f"{self._http.url} refuses the action: {reply.status} {reply.detail}")
        if reply.status == 501:
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


def _classic_is_busy(reply: Reply) -> bool:
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


# --- A task-server adapter, or a pool of them: one conversation as an episode, rewards in every answer.


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


# --- State shared by the episodes of one AgentBench server: address, connections and protocol.


class AgentBenchEpisode:
    """One episode. A task's row names its sample by ``index``."""

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


class AgentBenchWorld:
    """An indexed world (see ``envs/base.py``). The server is first spoken to by the first episode."""

    is_remote = True  # the server is at fault for errors of its episodes, not the action

    def __init__(self, config: AgentBenchConfig) -> None:
        self._config = config
        self._http = HttpConnection(config.url, _CONNECTIONS)
        self._server: ClassicServer | AdapterServer | None = None
        self._finding = asyncio.Lock()

    async def server(self) -> ClassicServer | AdapterServer:
        """Raises ``InfrastructureError`` when the server does not answer; the next episode asks again."""
        async with self._finding:
            if self._server is None:
                self._server = await self._find()
            return self._server

    async def indices(self) -> Sequence[Index]:
        return await (await self.server()).indices()

    def build(self) -> AgentBenchEpisode:
        return AgentBenchEpisode(self.server)

    async def close(self) -> None:
        if self._server is not None:
            await self._server.close()
        await self._http.close()

    async def _find(self) -> ClassicServer | AdapterServer:
        protocol: str = self._config.protocol
        if protocol == "auto":
            protocol = await self._ask_protocol()
            log.info("agentbench.found", url=self._config.url, protocol=protocol)
        if protocol == "classic":
            return ClassicServer(self._http, self._config)
        return AdapterServer(self._http, self._config)

    async def _ask_protocol(self) -> str:
        """A server that speaks both is taken for a controller, which refuses two turns at once."""
        for protocol, path in (("classic", "list_workers"), ("adapter", "task/info")):
            reply = await self._http.ask(path)
            if reply.status == 200 and isinstance(reply.json, dict):
                return protocol
        raise InfrastructureError(f"{self._config.url} is no AgentBench server: it answered {reply.status}")


def make_world(name: str, config: AgentBenchConfig) -> AgentBenchWorld:
    return AgentBenchWorld(config)
