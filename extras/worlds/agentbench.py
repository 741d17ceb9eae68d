"""Episodes that an AgentBench server plays, in either of its protocols.

The adapter plays one conversation as an episode, with rewards in its answers. Status codes of the classic controller
have meanings of their own:
- 406 means no free worker, or an unknown task.
- A plain-text 500 means that a lock was not free for a second: the request had no effect; try again.
- 501 means that the task raised. The controller goes on listing the session and counting its slot, which only a
  synchronisation with the workers frees; the worker has forgotten the session, so no cancellation works.
- 400 after the end: the controller has forgotten the session.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson
import structlog

from extras.worlds.settings import AgentBenchConfig
from services.common.aio import TaskOwner, backoff
from services.common.errors import CapacityError, ConfigError, InfrastructureError, InvalidRequestError
from services.envgateway.envs.base import EndStatus, EpisodeLostError, Observation, StepResult

log = structlog.get_logger()

Index = int | str  # of a sample
Session = int | str
Chat = Sequence[Mapping[str, str]]  # role (user, assistant) and content; the last is the first turn

_QUESTION_S = 10.0  # requests that start no session
_LEAST_S = 0.1  # with less, a server could take the turn and its answer come too late
_CANCEL_S = 4.5  # less than the gateway waits for an environment to close
_SYNC_S = 60.0
_SYNC_ATTEMPTS = 6
_SHOWN_CHARS = 300
_MOST_CHARS = 100_000  # of an action: far above any reply, far below the limits of servers
_CONTENT_REFUSED = (413, 422)  # too large: an answer outside of the protocol
_FULL = (406, 429, 503)
_RUNNING = "running"


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

    def __str__(self) -> str:
        return f"{self.status} {self.detail}"


class AgentBenchWorld:
    """HTTP client of one server. The server is first spoken to by the first episode.

    Each connection serves one request: these servers close idle ones without notice, and a request that meets the closing of
    its connection may or may not have been carried out.
    """

    is_remote = True  # the server is at fault for errors of its episodes, not the action
    is_indexed = True

    def __init__(self, config: AgentBenchConfig) -> None:
        self._config = config
        self.url = config.url.rstrip("/")
        self._client: aiohttp.ClientSession | None = None
        self._protocol = ""  # classic or adapter, once the server was asked
        self._finding = asyncio.Lock()
        self._task = config.task  # of a classic controller
        self._leaked: set[str] = set()  # sessions that the controller counts and no worker has
        self._syncing: asyncio.Task[Any] | None = None
        self._tasks = TaskOwner()

    def build(self) -> AgentBenchEpisode:
        return AgentBenchEpisode(self)

    async def start(self, index: Index) -> tuple[Session, Chat]:
        """Raises ``CapacityError`` when there is no place, ``InvalidRequestError`` for an index that is none."""
        async with self._finding:
            if not self._protocol:
                self._protocol = await self._ask_protocol()
            if self._protocol == "classic" and not self._task:
                self._task = await self._only_task()
        if self._protocol == "classic":
            return await self._start_sample(index)
        return await self._start_episode(index)

    async def interact(self, session: Session, action: str) -> StepResult:
        """Ask until the server takes the turn, within the time of one.

        Raises:
            InfrastructureError: the server did not take the turn; the caller may repeat the turn.
            EpisodeLostError: the server ended the session, or may have taken the turn and does not answer.
        """
        until = time.monotonic() + self._config.step_timeout_s
        left_s = self._config.step_timeout_s
        is_classic = self._protocol == "classic"
        path, body = "episode/step", {"episode_id": session, "action": {"type": "text", "content": action}}
        if is_classic:
            path, body = "interact", {"session_id": session, "agent_response": {"status": "normal", "content": action}}
        for pause_s in backoff(first_s=0.2, longest_s=2.0):
            reply = await self._request("POST", path, left_s, EpisodeLostError, json=body)
            if reply.status == 200:
                return _classic_turn(reply) if is_classic else _adapter_turn(reply)
            if reply.status in _CONTENT_REFUSED:  # the action is at fault, and the session is over for us
                await self.cancel(session)
                told = f"{self.url} refuses the action: {reply}"
                return StepResult(observation=told, done=True, status=EndStatus.INVALID_ACTION)
            is_busy = reply.status == 409
            if is_classic:
                is_busy = reply.status == 500 or (reply.status == 400 and "Task Executing" in reply.detail)
            if not is_busy:
                if is_classic and reply.status == 501:
                    self._free_slot_of(session)
                raise EpisodeLostError(f"{self.url} ended session {session}: {reply}")
            left_s = until - time.monotonic() - pause_s
            if left_s < _LEAST_S:
                break
            await asyncio.sleep(pause_s)
        raise InfrastructureError(f"{self.url} was busy with this session for {self._config.step_timeout_s:g} s")

    async def cancel(self, session: Session) -> None:
        """End a session early. Failures are logged: the server collects sessions that remain."""
        is_classic = self._protocol == "classic"
        path, key = ("cancel", "session_id") if is_classic else ("episode/cancel", "episode_id")
        try:
            reply = await self._request("POST", path, _CANCEL_S, json={key: session})
        except InfrastructureError as error:
            log.warning("agentbench.cancel_failed", error=str(error))
            return
        if reply.status != 200:
            log.info("agentbench.not_cancelled", reply=str(reply))

    async def close(self) -> None:
        await self._tasks.close()
        if self._client is not None:
            await self._client.close()

    async def _start_sample(self, index: Index) -> tuple[Session, Chat]:
        body = {"name": self._task, "index": index}
        reply = await self._request("POST", "start_sample", self._config.start_timeout_s, json=body)
        match reply.status:
            case 200:
                output, session = _output(reply), reply.json.get("session_id")
                if not isinstance(session, int):
                    raise InfrastructureError(f"{self.url} names no session by a number: {reply.text:.120}")
                if output["status"] != _RUNNING:
                    raise InfrastructureError(f"session {session} ended before its first turn: {output['status']}")
                return session, _chat(output.get("history"))
            case 406 if "does not exist" in reply.detail:
                raise InfrastructureError(f"{self.url} has no task {self._task!r}, or no worker of it yet")
            case 406 | 500:
                raise CapacityError(f"{self.url} has no place: {reply.detail}", retry_after_s=1.0)
            case 400 if "out of bounds" in reply.detail:
                raise InvalidRequestError(f"{self._task} has no sample {index!r}")
            case 422:
                raise InvalidRequestError(f"{self.url} refuses sample {index!r}: {reply.detail}")
        raise InfrastructureError(f"{self.url} could not start: {reply}")

    async def _start_episode(self, index: Index) -> tuple[Session, Chat]:
        body: dict[str, object] = {"sample_id": index, "config": {}}
        reply = await self._request("POST", "episode/start", self._config.start_timeout_s, json=body)
        if reply.status in _FULL:
            raise CapacityError(f"{self.url}: {reply.detail}", retry_after_s=2.0)
        if reply.status in (400, 404, 422):
            raise InvalidRequestError(f"{self.url} refuses sample {index!r}: {reply.detail}")
        if reply.status != 200:
            raise InfrastructureError(f"{self.url} could not start: {reply}")
        answer = _answer(reply)
        observation = answer.get("observation")
        if answer.get("done") or not isinstance(observation, dict):
            raise InfrastructureError(f"the episode ended before its first turn: {reply.text:.200}")
        content = observation.get("content")
        chat = [{"role": "user", "content": content}] if isinstance(content, str) else _chat(content)
        return str(answer["episode_id"]), chat

    async def _ask_protocol(self) -> str:
        """A server that speaks both is taken for a controller, which refuses two turns at once. Raises
        ``InfrastructureError`` when the server does not answer; the next episode asks again."""
        for protocol, path in (("classic", "list_workers"), ("adapter", "task/info")):
            reply = await self._request("GET", path)
            if reply.status == 200 and isinstance(reply.json, dict):
                log.info("agentbench.found", url=self.url, protocol=protocol)
                return protocol
        raise InfrastructureError(f"{self.url} is no AgentBench server: it answered {reply.status}")

    async def _only_task(self) -> str:
        names = list((await self._request("GET", "list_workers")).json or ())
        if not names:
            raise InfrastructureError(f"no worker has registered at {self.url} yet")
        if len(names) > 1:
            raise ConfigError(f"{self.url} has the tasks {', '.join(names)}: name one in the config (`task`)")
        return str(names[0])

    def _free_slot_of(self, session: Session) -> None:
        self._leaked.add(str(session))
        if self._syncing is None or self._syncing.done():
            self._syncing = self._tasks.start(self._sync(), "synchronise an AgentBench controller")

    async def _sync(self) -> None:
        """Synchronise until the controller has dropped leaked sessions: a synchronisation fails while a session ends."""
        for _, pause_s in zip(range(_SYNC_ATTEMPTS), backoff(first_s=0.5), strict=False):
            try:
                await self._request("POST", "sync_all", _SYNC_S)
                self._leaked &= set((await self._request("GET", "list_sessions")).json or ())
            except InfrastructureError as error:
                log.warning("agentbench.sync_failed", error=str(error))
            if not self._leaked:
                return
            await asyncio.sleep(pause_s)
        log.warning("agentbench.slots_leaked", sessions=sorted(self._leaked))
        self._leaked.clear()

    async def _request(
        self,
        method: str,
        path: str,
        timeout_s: float = _QUESTION_S,
        unanswered: type[InfrastructureError] = InfrastructureError,
        **content: Any,
    ) -> Reply:
        """Raises ``unanswered`` where the server may have carried out the request, else ``InfrastructureError``."""
        if self._client is None:
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            self._client = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        what = f"{method} {self.url}/{path}"
        try:
            async with asyncio.timeout(timeout_s):
                async with self._client.request(method, f"{self.url}/{path}", **content) as response:
                    return Reply(response.status, await response.text(errors="replace"))
        except TimeoutError:
            raise unanswered(f"{what}: no answer within {timeout_s:g} s: it may have been carried out") from None
        except aiohttp.ClientConnectorError as error:
            raise InfrastructureError(f"{what}: {error}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise unanswered(f"{what}: {type(error).__name__}: {error}: it may have been carried out") from error


def _classic_turn(reply: Reply) -> StepResult:
    output = _output(reply)
    if output["status"] == _RUNNING:
        return StepResult(observation=_chat(output.get("history"))[-1]["content"])
    status = _end_status(output["status"])
    return StepResult(done=True, reward=reward_of(output.get("result"), status), status=status)


def _adapter_turn(reply: Reply) -> StepResult:
    answer = _answer(reply)
    if answer.get("done"):
        status = _end_status((answer.get("info") or {}).get("status", EndStatus.COMPLETED))
        return StepResult(done=True, reward=reward_of(answer, status), status=status)
    observation = answer.get("observation")
    if not isinstance(observation, dict) or not isinstance(observation.get("content"), str):
        raise EpisodeLostError(f"the server's answer has no observation: {reply.text:.120}")
    return StepResult(observation=observation["content"], reward=reward_of(answer, EndStatus.COMPLETED))


def _answer(reply: Reply) -> dict[str, Any]:
    body = reply.json
    if not isinstance(body, dict) or "episode_id" not in body:
        raise EpisodeLostError(f"the server's answer is no episode: {reply.text:.120}")
    return body


def _output(reply: Reply) -> dict[str, Any]:
    body = reply.json
    output = body.get("output") if isinstance(body, dict) else None
    if not isinstance(output, dict) or "status" not in output:
        raise EpisodeLostError(f"the controller's answer has no output: {reply.text:.120}")
    return output


def _chat(history: Any) -> list[dict[str, str]]:
    """AgentBench's history with the usual roles. Raises ``EpisodeLostError`` for any other value."""
    if not isinstance(history, list) or not history:
        raise EpisodeLostError(f"the server showed no conversation, but {history!r:.80}")
    try:
        return [
            {"role": "assistant" if m["role"] == "agent" else m["role"], "content": str(m["content"])} for m in history
        ]
    except (KeyError, TypeError) as error:
        raise EpisodeLostError(f"the server showed a conversation without roles: {error!r}") from error


def _end_status(told: object) -> EndStatus:
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


def sendable(action: str) -> str:
    """The action in a form that every server reads: no lone surrogates, no NUL, bounded length."""
    return action[:_MOST_CHARS].encode(errors="replace").decode().replace("\0", "\ufffd")


class AgentBenchEpisode:
    """One episode. A task's row names its sample by ``index``."""

    def __init__(self, world: AgentBenchWorld) -> None:
        self._world = world
        self._session: Session | None = None

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        """Reset. The server draws the task; the seed is not used."""
        index = task.get("index")
        if isinstance(index, bool) or not isinstance(index, int | str):
            raise InvalidRequestError("the task names no sample: it needs `index`, a number or a name")
        self._session, messages = await self._world.start(index)
        return Observation(text="\n\n".join(message["content"] for message in messages), messages=messages)

    async def step(self, action: str) -> StepResult:
        assert self._session is not None, "stepped before reset, or after the end"
        try:
            result = await self._world.interact(self._session, sendable(action))
        except EpisodeLostError:
            await self.close()  # some servers keep counting sessions at which they failed
            raise
        if result.done:
            self._session = None  # the server has forgotten the session
        return result

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await self._world.cancel(session)


def make_world(name: str, config: AgentBenchConfig) -> AgentBenchWorld:
    return AgentBenchWorld(config)
