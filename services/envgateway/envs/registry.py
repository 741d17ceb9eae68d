"""Environments by name: the built-in ones, and those that the recipe names by import path."""

from __future__ import annotations

from collections.abc import Mapping

from services.common.errors import ConfigError, UnknownEnvironmentError
from services.common.importing import load_object
from services.envgateway.envs.base import Environment, EnvironmentContext, EnvironmentFactory
from services.envgateway.envs.single_step import SingleStep
from services.envgateway.envs.tool_loop import ToolLoop

ENVIRONMENTS: dict[str, EnvironmentFactory] = {"single_step": SingleStep, "tool": ToolLoop}


class EnvironmentRegistry:
    """Builds one environment per episode. Import paths are loaded at start: a typo costs a second, not a run."""

    def __init__(self, paths: Mapping[str, str], context: EnvironmentContext) -> None:
        self._context = context
        self._factories = dict(ENVIRONMENTS)
        for name, path in paths.items():
            factory = load_object(path)
            for method in ("reset", "step", "close"):
                if not callable(getattr(factory, method, None)):
                    raise ConfigError(f"envgateway.environments.{name}: {path} has no method {method}()")
            self._factories[name] = factory

    @property
    def names(self) -> list[str]:
        return sorted(self._factories)

    def build(self, name: str) -> Environment:
        factory = self._factories.get(name)
        if factory is None:
            raise UnknownEnvironmentError(f"no environment {name!r}; this gateway has {', '.join(self.names)}")
        return factory(self._context)
