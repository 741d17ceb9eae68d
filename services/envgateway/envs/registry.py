"""Environments by name: the built-in ones, those of worlds, and those that the recipe names by import path."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import structlog

from services.common.errors import ConfigError, UnknownEnvironmentError
from services.common.importing import load_object
from services.common.user_code import check_methods
from services.envgateway.calls import call_plain_or_async
from services.envgateway.envs.base import (
    ActionFailedError,
    EndStatus,
    Environment,
    EnvironmentContext,
    EnvironmentFactory,
    IndexedWorld,
    Observation,
    StepResult,
    World,
)
from services.envgateway.envs.builtin import SingleStep, ToolCalls, ToolLoop
from services.envgateway.envs.failures import DATA_ERRORS, short_text, trace_of
from services.envgateway.envs.gymnasium.style import GymnasiumFactory, is_gymnasium_style
from services.envgateway.envs.household_toy import HouseholdToyEnvironment

log = structlog.get_logger()


_OF_THE_ACTION: tuple[type[Exception], ...] = (*DATA_ERRORS, ActionFailedError)


class GuardedEnvironment:
    """A built-in environment whose faulty action ends the episode and is not repeated.

    An exception of ``DATA_ERRORS`` from a step ends the episode as an invalid action without a reward, is logged with
    its trace and counted. As an infrastructure failure, the task would be played again, and a policy would learn to
    fail like that.
    """

    def __init__(self, inner: Environment, name: str, counts: Counter[str]) -> None:
        """``counts`` has the actions that failed, by ``name``."""
        self._inner = inner
        self._name = name
        self._counts = counts

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        observation: Observation = await call_plain_or_async(self._inner.reset, task, seed)
        return observation

    async def step(self, action: str) -> StepResult:
        try:
            result: StepResult = await call_plain_or_async(self._inner.step, action)
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
        await call_plain_or_async(self._inner.close)


ENVIRONMENTS: dict[str, EnvironmentFactory] = {
    "household_toy": HouseholdToyEnvironment,
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
        self._factories = dict(ENVIRONMENTS)
        self._worlds: dict[str, World] = {}
        self.failed_actions: Counter[str] = Counter()
        self._absent: dict[str, str] = {}
        for name, world in (worlds or {}).items():
            if isinstance(world, str):
                self._absent[name] = world
            else:
                self._worlds[name] = world
        for name, path in paths.items():
            if name in ENVIRONMENTS or name in (worlds or {}):
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
        """Environments that can list their tasks."""
        return sorted(name for name, world in self._worlds.items() if isinstance(world, IndexedWorld))

    @property
    def absent(self) -> Mapping[str, str]:
        """Unavailable worlds, with the missing part of each."""
        return self._absent

    def build(self, name: str) -> Environment:
        """Build an environment. Raises ``UnknownEnvironmentError``, which names a missing part."""
        self.require(name)
        world = self._worlds.get(name)
        environment = self._factories[name](self._context) if world is None else world.build()
        return GuardedEnvironment(environment, name, self.failed_actions) if name in self._guarded else environment

    def require(self, name: str) -> None:
        """Raises ``UnknownEnvironmentError``, which names a missing part."""
        if name in self._worlds or name in self._factories:
            return
        if name in self._absent:
            raise UnknownEnvironmentError(f"the environment {name!r} is not set up here: {self._absent[name]}")
        raise UnknownEnvironmentError(f"no environment {name!r}; this gateway has {', '.join(self.names)}")

    async def indices(self, name: str) -> Sequence[int | str] | None:
        """The environment's tasks; None where no list exists. Raises the errors of loading the world."""
        world = self._worlds.get(name)
        return await world.indices() if isinstance(world, IndexedWorld) else None

    def max_turns(self, name: str) -> int | None:
        """Turns of an episode, where its world has an attribute of this name."""
        return getattr(self._worlds.get(name), "max_turns", None)

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
        return GymnasiumFactory(factory)
    check_methods(factory, f"envgateway.environments.{name}: {path}", ENVIRONMENT_METHODS)
    return factory  # type: ignore[no-any-return]
