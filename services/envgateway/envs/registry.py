"""Environments by name: the built-in ones, those of worlds, and those that the recipe names by import path."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from services.common.errors import ConfigError, UnknownEnvironmentError
from services.common.importing import load_object
from services.envgateway.envs.base import Environment, EnvironmentContext, EnvironmentFactory, IndexedWorld, World
from services.envgateway.envs.guarded import GuardedEnvironment
from services.envgateway.envs.gymnasium import GymnasiumFactory, is_gymnasium_style
from services.envgateway.envs.rooms.environment import RoomsEnvironment
from services.envgateway.envs.single_step import SingleStep
from services.envgateway.envs.tool_calls import ToolCalls
from services.envgateway.envs.tool_loop import ToolLoop

ENVIRONMENTS: dict[str, EnvironmentFactory] = {
    "rooms": RoomsEnvironment,
    "single_step": SingleStep,
    "tool": ToolLoop,
    "tools": ToolCalls,
}


class EnvironmentRegistry:
    """Builds one environment per episode. Import paths are loaded at start: a typo costs a second, not a run."""

    def __init__(
        self,
        paths: Mapping[str, str],
        context: EnvironmentContext,
        worlds: Mapping[str, World | str] | None = None,
    ) -> None:
        """``worlds`` has a reason in place of a world that cannot be offered as the config stands."""
        self._context = context
        self._factories = dict(ENVIRONMENTS)
        self._worlds: dict[str, World] = {}
        self._failed_actions: Counter[str] = Counter()
        self._absent: dict[str, str] = {}
        for name, world in (worlds or {}).items():
            if isinstance(world, str):
                self._absent[name] = world
            else:
                self._worlds[name] = world
        for name, path in paths.items():
            self._factories[name] = _load(name, path)
            self._worlds.pop(name, None)  # a recipe's own goes before ours
        ours = {
            *ENVIRONMENTS,
            *(name for name, world in self._worlds.items() if not getattr(world, "is_remote", False)),
        }
        self._guarded = ours - {*paths}

    @property
    def names(self) -> list[str]:
        return sorted({*self._factories, *self._worlds})

    @property
    def names_with_indices(self) -> list[str]:
        """Environments that can list their tasks."""
        return sorted(name for name, world in self._worlds.items() if isinstance(world, IndexedWorld))

    @property
    def absent(self) -> Mapping[str, str]:
        """Worlds that are not set up here, with what is missing for each."""
        return self._absent

    def build(self, name: str) -> Environment:
        """Raises ``UnknownEnvironmentError``, which says what is missing where something is."""
        self.require(name)
        world = self._worlds.get(name)
        environment = self._factories[name](self._context) if world is None else world.build()
        return GuardedEnvironment(environment, name, self._failed_actions) if name in self._guarded else environment

    def require(self, name: str) -> None:
        """Raises ``UnknownEnvironmentError``, which says what is missing where something is."""
        if name in self._worlds or name in self._factories:
            return
        if name in self._absent:
            raise UnknownEnvironmentError(f"the environment {name!r} is not set up here: {self._absent[name]}")
        raise UnknownEnvironmentError(f"no environment {name!r}; this gateway has {', '.join(self.names)}")

    async def indices(self, name: str) -> Sequence[int | str] | None:
        """Its tasks; None where it cannot list them. Raises what loading the world raises."""
        world = self._worlds.get(name)
        return await world.indices() if isinstance(world, IndexedWorld) else None

    def max_turns(self, name: str) -> int | None:
        """Turns of its episodes, where its world says so in an attribute of this name."""
        return getattr(self._worlds.get(name), "max_turns", None)

    @property
    def gauges(self) -> dict[str, float]:
        """What the worlds count, where they do, in an attribute of this name; and actions at which ours failed."""
        counted = {name: n for world in self._worlds.values() for name, n in getattr(world, "gauges", {}).items()}
        return counted | {f"{name}_failed_actions": float(n) for name, n in self._failed_actions.items()}

    async def close(self) -> None:
        """Release what the worlds hold; every episode is closed by now."""
        for world in self._worlds.values():
            await world.close()


def _load(name: str, path: str) -> EnvironmentFactory:
    factory = load_object(path)
    if is_gymnasium_style(factory):
        return GymnasiumFactory(factory)
    for method in ("reset", "step", "close"):
        if not callable(getattr(factory, method, None)):
            raise ConfigError(f"envgateway.environments.{name}: {path} has no method {method}()")
    return factory  # type: ignore[no-any-return]
