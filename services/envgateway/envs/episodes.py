"""Episodes: leases, expiry, capacity, and steps that may be repeated.

Invariants
- One create per request id: a repeated one gives the same episode.
- One result per (episode, turn): a repeated turn gives the stored result, or joins the running step.
- A step that failed for infrastructure did not happen: the same turn may be repeated. An environment that was lost,
  raised anything else, or stalled, is closed.
- An episode without a call for longer than the lease ends; a running step keeps the episode.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import structlog

from services.common.config.envgateway import EnvGatewayConfig
from services.common.errors import (
    CapacityError,
    ConfigError,
    EpisodeNotFoundError,
    InfrastructureError,
    InvalidRequestError,
    RollmillError,
    StateError,
    UnknownEnvironmentError,
)
from services.common.extras import load_extra, provided
from services.common.importing import check_methods, load_object, place_of_error
from services.common.records import encodable
from services.envgateway.calls import THREADS
from services.envgateway.envs.base import (
    DATA_ERRORS,
    ActionFailedError,
    EndStatus,
    EnvironmentContext,
    EnvironmentFactory,
    EnvironmentLike,
    EpisodeLostError,
    Observation,
    SingleStep,
    StepResult,
    ToolCalls,
    ToolLoop,
    World,
    short_text,
    trace_of,
)
from services.envgateway.envs.gymnasium import GymnasiumEnvironment, is_gymnasium_style

if TYPE_CHECKING:
    from services.envgateway.sandbox.pool import SandboxPool


# --- Environments by name: the built-in ones, those of worlds, and those that the recipe names by import path.


log = structlog.get_logger()


_OF_THE_ACTION: tuple[type[Exception], ...] = (*DATA_ERRORS, ActionFailedError)


class GuardedEnvironment:
    """A built-in environment whose faulty action ends the episode and is not repeated.

    An exception of ``DATA_ERRORS`` from a step ends the episode as an invalid action without a reward, is logged with
    its trace and counted. As an infrastructure failure, the task would be played again, and a policy would learn to
    fail like that.
    """

    def __init__(self, inner: EnvironmentLike, name: str, counts: Counter[str]) -> None:
        """``counts`` has the actions that failed, by ``name``."""
        self._inner = inner
        self._name = name
        self._counts = counts

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        observation: Observation = await THREADS.call(self._inner.reset, task, seed)
        return observation

    async def step(self, action: str) -> StepResult:
        try:
            result: StepResult = await THREADS.call(self._inner.step, action)
        except _OF_THE_ACTION as error:
            self._counts[self._name] += 1
            log.warning(
                "environment.action_failed", environment=self._name, error=short_text(error), trace=trace_of(error)
            )
            return StepResult(
                observation="The action could not be read.",
                done=True,
                status=EndStatus.INVALID_ACTION,
                metrics={"failed_actions": 1.0},
            )
        return result

    async def close(self) -> None:
        await THREADS.call(self._inner.close)


ENVIRONMENTS: dict[str, EnvironmentFactory] = {
    "single_step": SingleStep,
    "tool": ToolLoop,
    "tools": ToolCalls,
}


ENVIRONMENT_METHODS = {
    "reset": "def reset(self, task, seed) -> Observation",
    "step": "def step(self, action) -> StepResult",
    "close": "def close(self) -> None",
}


class EnvironmentRegistry:
    """Builds one environment per episode. Import paths are loaded at start: a typo costs a second, not a run."""

    def __init__(
        self,
        paths: Mapping[str, str],
        context: EnvironmentContext,
        worlds: Mapping[str, World | str] | None = None,
    ) -> None:
        """``worlds`` maps a world that the config cannot offer to the reason."""
        self._context = context
        worlds = worlds or {}
        self._factories = dict(ENVIRONMENTS)
        self._worlds: dict[str, World] = {name: one for name, one in worlds.items() if not isinstance(one, str)}
        # unavailable worlds, with the missing part of each
        self.absent = {name: why for name, why in worlds.items() if isinstance(why, str)}
        self.failed_actions: Counter[str] = Counter()
        for name, path in paths.items():
            if name in ENVIRONMENTS or name in worlds:
                raise ConfigError(
                    f"envgateway.environments.{name}: Rollmill has an environment of this name: write another name before {path}"
                )
            self._factories[name] = _load(name, path)
        self._guarded = {
            *ENVIRONMENTS,
            *(name for name, world in self._worlds.items() if not getattr(world, "is_remote", False)),
        }

    @property
    def names(self) -> list[str]:
        return sorted({*self._factories, *self._worlds})

    @property
    def names_with_indices(self) -> list[str]:
        """Environments whose tasks are numbered."""
        return sorted(name for name, world in self._worlds.items() if getattr(world, "is_indexed", False))

    def build(self, name: str) -> EnvironmentLike:
        """Build an environment. Raises ``UnknownEnvironmentError``, which names a missing part."""
        self.require(name)
        world = self._worlds.get(name)
        environment = self._factories[name](self._context) if world is None else world.build()
        return GuardedEnvironment(environment, name, self.failed_actions) if name in self._guarded else environment

    def require(self, name: str) -> None:
        """Raises ``UnknownEnvironmentError``, which names a missing part."""
        if name in self._worlds or name in self._factories:
            return
        if name in self.absent:
            raise UnknownEnvironmentError(f"the environment {name!r} is not set up here: {self.absent[name]}")
        raise UnknownEnvironmentError(f"no environment {name!r}; this gateway has {', '.join(self.names)}")

    @property
    def gauges(self) -> dict[str, float]:
        """Counts of the worlds that have an attribute ``gauges``; and failed actions of built-in environments."""
        counted = {name: n for world in self._worlds.values() for name, n in getattr(world, "gauges", {}).items()}
        return counted | {f"{name}_failed_actions": float(n) for name, n in self.failed_actions.items()}

    async def close(self) -> None:
        """Release the worlds' resources; every episode is closed by now."""
        for world in self._worlds.values():
            await world.close()


def _load(name: str, path: str) -> EnvironmentFactory:
    factory = load_object(path)
    if is_gymnasium_style(factory):
        return lambda context: GymnasiumEnvironment(factory())
    check_methods(factory, f"envgateway.environments.{name}: {path}", ENVIRONMENT_METHODS)
    return factory  # type: ignore[no-any-return]


STEP_TIMEOUT_S = 55.0  # less than callers wait, so that they get the reason
_CLOSE_TIMEOUT_S = 5.0
_CLOSED_AT_ONCE = 32
LONGEST_SWEEP_PAUSE_S = 5.0
_REMEMBERED_LOSSES = 1024
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class EpisodeStart:
    episode_id: str
    observation: Observation
    lease_s: float


@dataclass(slots=True)
class _Episode:
    id: str
    request_id: str
    environment: EnvironmentLike
    expires: float
    results: list[StepResult] = field(default_factory=list)  # by turn, from 1
    running: asyncio.Task[StepResult] | None = None
    running_action: str = ""


class EpisodeManager:
    """Holds every live episode. ``expire_forever`` runs in a task beside the calls."""

    def __init__(
        self,
        environments: EnvironmentRegistry,
        *,
        max_episodes: int,
        lease_s: float,
        step_timeout_s: float = STEP_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._environments = environments
        self._max_episodes = max_episodes
        self._lease_s = lease_s
        self._step_timeout_s = step_timeout_s
        self._clock = clock
        self._closed = False
        self._episodes: dict[str, _Episode] = {}
        self._starts: dict[str, asyncio.Task[EpisodeStart]] = {}  # by request id, while the episode lives
        self._creating = 0
        self._lost: OrderedDict[str, str] = OrderedDict()  # reasons, for callers that ask again
        self.counts: Counter[str] = Counter()

    @property
    def num_live(self) -> int:
        return len(self._episodes)

    def is_live(self, episode_id: str) -> bool:
        return episode_id in self._episodes

    async def create(self, request_id: str, environment: str, task: Mapping[str, Any], seed: int) -> EpisodeStart:
        """Begin an episode, or give the one that this request id began.

        Raises:
            CapacityError: as many episodes as allowed are live.
            InfrastructureError: the gateway is stopping; the one that is started in its place begins the episode.
            UnknownEnvironmentError, InvalidRequestError, InfrastructureError: raised by the environment.
        """
        if self._closed:
            raise InfrastructureError("the gateway is stopping")
        key = request_id or uuid.uuid4().hex
        start = self._starts.get(key)
        if start is None:
            if len(self._episodes) + self._creating >= self._max_episodes:
                raise CapacityError(f"{self._max_episodes} episodes are live", retry_after_s=1.0)
            self._creating += 1
            # A task of its own: the caller may go, and ask again with the same id.
            start = asyncio.create_task(self._begin(key, environment, task, seed), name=f"create {environment}")
            self._starts[key] = start
            start.add_done_callback(lambda done: self._begun(key, done))
        return await _joined(start, "the gateway is stopping")

    async def step(self, episode_id: str, turn: int, action: str) -> StepResult:
        """Take one turn, counted from 1.

        Raises:
            EpisodeLostError: with this turn; asking again raises ``EpisodeNotFoundError``.
            EpisodeNotFoundError: the episode was closed, was lost or has expired.
            StateError: the episode is over, or another step runs.
            InvalidRequestError: the turn is neither the next nor an earlier one.
        """
        episode = self._episodes.get(episode_id)
        if episode is None:
            why = self._lost.get(episode_id, "it was closed or has expired")
            raise EpisodeNotFoundError(f"no episode {episode_id!r}: {why}")
        episode.expires = self._clock() + self._lease_s
        taken = len(episode.results)
        if 1 <= turn <= taken:
            return episode.results[turn - 1]
        if turn != taken + 1:
            raise InvalidRequestError(f"turn {turn} cannot follow turn {taken}; the next is {taken + 1}")
        if episode.results and episode.results[-1].done:
            raise StateError(f"the episode ended with turn {taken}")
        if episode.running is None:
            episode.running_action = action
            episode.running = asyncio.create_task(self._take_turn(episode, action), name=f"step {episode_id}")
            episode.running.add_done_callback(_look_at)
        elif episode.running_action != action:
            raise StateError(f"turn {turn} is being taken with another action")
        return await _joined(episode.running, f"no episode {episode_id!r}: it was closed while a turn was being taken")

    async def close(self, episode_id: str) -> None:
        """End an episode; one that is unknown has ended already."""
        episode = self._episodes.get(episode_id)
        if episode is not None:
            await self._end(episode, "closed")

    async def close_all(self) -> None:
        """End all episodes, including those that are starting; no new episode starts from here on."""
        self._closed = True
        beginning = [start for start in self._starts.values() if not start.done()]
        for start in beginning:
            start.cancel()
        if beginning:
            await asyncio.wait(beginning)
        await self._end_some(list(self._episodes.values()), "closed")

    async def expire_forever(self) -> None:
        """Close episodes whose lease has ended. Ends by cancellation."""
        while True:
            await asyncio.sleep(min(LONGEST_SWEEP_PAUSE_S, self._lease_s / 4))
            await self.expire()

    async def expire(self) -> None:
        overdue = list(filter(self._is_overdue, self._episodes.values()))
        # Asked again in its turn: a caller may come while the episode waits for others to close.
        await self._end_some(overdue, "expired", self._is_overdue)

    def _is_overdue(self, episode: _Episode) -> bool:
        return episode.expires <= self._clock() and episode.running is None

    async def _end_some(
        self, episodes: list[_Episode], why: str, still: Callable[[_Episode], bool] = lambda _: True
    ) -> None:
        """A few at a time: thousands that close at once would wait for each other beyond the time they have."""
        ending = iter(episodes)

        async def end_in_turn() -> None:
            for episode in ending:
                if still(episode):
                    await self._end(episode, why)

        await asyncio.gather(*(end_in_turn() for _ in range(min(_CLOSED_AT_ONCE, len(episodes)))))

    async def _begin(self, key: str, name: str, task: Mapping[str, Any], seed: int) -> EpisodeStart:
        environment = await self._within_deadline(self._built(name), f"environment {name}")
        try:
            observation = await self._within_deadline(_reset(environment, task, seed), f"{name}.reset")
        except BaseException:
            await self._close_environment(environment)
            raise
        episode = _Episode(uuid.uuid4().hex, key, environment, self._clock() + self._lease_s)
        self._episodes[episode.id] = episode
        self.counts["created"] += 1
        return EpisodeStart(episode.id, observation, self._lease_s)

    async def _built(self, name: str) -> EnvironmentLike:
        return self._environments.build(name)

    def _begun(self, key: str, start: asyncio.Task[EpisodeStart]) -> None:
        self._creating -= 1
        if start.cancelled() or start.exception() is not None:
            del self._starts[key]

    async def _take_turn(self, episode: _Episode, action: str) -> StepResult:
        try:
            result = await self._within_deadline(_step(episode.environment, action), "step")
        except EpisodeLostError as error:
            self._lost[episode.id] = f"it was lost: {error.message}"
            while len(self._lost) > _REMEMBERED_LOSSES:
                self._lost.popitem(last=False)
            await self._end(episode, "failed")
            raise
        finally:
            episode.running = None
            episode.expires = self._clock() + self._lease_s
        episode.results.append(result)
        self.counts["steps"] += 1
        return result

    async def _within_deadline(self, work: Coroutine[Any, Any, Result], what: str) -> Result:
        """Our own errors pass; any other exception of an environment, or a timeout, is an infrastructure failure."""
        try:
            async with asyncio.timeout(self._step_timeout_s):
                return await work
        except RollmillError:
            raise
        except TimeoutError as error:
            raise EpisodeLostError(f"{what} took longer than {self._step_timeout_s:g} s") from error
        except (Exception, SystemExit) as error:  # a user's environment may raise any error: never a reward
            log.warning("environment.failed", what=what, error=short_text(error), trace=trace_of(error))
            raise EpisodeLostError(f"{place_of_error(error)}{what} raised {short_text(error)}") from error

    async def _end(self, episode: _Episode, why: str) -> None:
        if self._episodes.pop(episode.id, None) is None:
            return
        self._starts.pop(episode.request_id, None)
        self.counts[why] += 1
        if episode.running is not None and episode.running is not asyncio.current_task():
            episode.running.cancel()
        await self._close_environment(episode.environment)

    async def _close_environment(self, environment: EnvironmentLike) -> None:
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await THREADS.call(environment.close)
        except Exception as error:  # the episode is gone in any case; its environment's owner should know
            log.warning("environment.close_failed", exc_info=error)


async def _reset(environment: EnvironmentLike, task: Mapping[str, Any], seed: int) -> Observation:
    return checked_observation(await THREADS.call(environment.reset, task, seed))


async def _step(environment: EnvironmentLike, action: str) -> StepResult:
    return checked_result(await THREADS.call(environment.step, action))


async def _joined(work: asyncio.Task[Result], when_cancelled: str) -> Result:
    """Wait for work that continues without its callers. The end of the episode does not cancel them: they get an error."""
    await asyncio.wait({work})
    if work.cancelled():
        raise EpisodeNotFoundError(when_cancelled)
    return work.result()


def _look_at(turn: asyncio.Task[StepResult]) -> None:
    """Read the task's result: when all callers have left, asyncio would log an exception that is never retrieved."""
    if not turn.cancelled():
        turn.exception()


def checked_observation(returned: Any) -> Observation:
    """Raises ``TypeError`` for a value that is not an ``Observation``."""
    if not isinstance(returned, Observation):
        raise TypeError(f"it returned a {type(returned).__name__}, not an Observation")
    return dataclasses.replace(
        returned,
        text=_text(returned.text),
        admissible_actions=tuple(map(_text, returned.admissible_actions)),
        messages=tuple({key: _text(one[key]) for key in ("role", "content")} for one in returned.messages),
    )


def checked_result(returned: Any) -> StepResult:
    """Raises ``TypeError`` for a value that is not a ``StepResult`` and ``ValueError`` for a reward that is not a
    finite number."""
    if not isinstance(returned, StepResult):
        raise TypeError(f"it returned a {type(returned).__name__}, not a StepResult")
    reward = float(returned.reward)
    if not math.isfinite(reward):
        raise ValueError(f"its reward is {reward}; it must be a finite number")
    return dataclasses.replace(
        returned,
        observation=_text(returned.observation),
        reward=reward,
        done=bool(returned.done),
        admissible_actions=tuple(map(_text, returned.admissible_actions)),
        metrics={_text(name): float(value) for name, value in returned.metrics.items()},
        status=_text(returned.status),
    )


def _text(text: Any) -> str:
    """Replaces lone surrogates, which no message can carry. Raises ``TypeError`` for a value that is not text."""
    if not isinstance(text, str):
        raise TypeError(f"it returned a {type(text).__name__} where text belongs")
    return encodable(str(text))


# --- Worlds that a gateway's config can offer, or the missing part of a world.


def make_worlds(config: EnvGatewayConfig, sandbox: SandboxPool | None = None) -> dict[str, World | str]:
    """Worlds of the extras by name: a world, or the reason of its absence. An AgentBench server goes before the world of its
    name, which then needs no data. ``sandbox``: of the gateway, for worlds that run commands. Raises ``ConfigError`` for
    settings that cannot work."""
    own, replaced = provided("environments"), config.extra("agentbench") or {}
    taken = {*ENVIRONMENTS, *own, *replaced, *config.environments}
    worlds = {name: load_extra("environments", name)(config, sandbox) for name in own if name not in replaced}
    for section in provided("servers"):
        for name, entry in config.extra(section).items():
            if section != "agentbench" and name in taken:
                raise ConfigError(
                    f"envgateway.{section}.{name}: the gateway has an environment of this name: write another name"
                )
            taken.add(name)
            worlds[name] = load_extra("servers", section)(name, entry)
    return worlds
