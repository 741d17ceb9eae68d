"""The gateway's tools by name: the built-in ones, and those that the recipe names by import path.

Holds what all trajectories share of a tool: how many calls run at once, how long one may take, how much of it is shown.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.common.config.envgateway import ToolConfig
from services.common.errors import ConfigError, InvalidRequestError
from services.common.importing import load_object
from services.common.tool_calls import cut_text
from services.common.tool_schema import check_schema
from services.envgateway.tools.base import AnyTool, ToolResult, schema_of

DEFAULT_TIMEOUT_S = 30.0
DEFAULT_CONCURRENCY = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredTool:
    """A tool with its limits."""

    tool: AnyTool
    config: ToolConfig
    timeout_s: float | None  # None: it keeps its own
    running: asyncio.Semaphore


class ToolBox:
    """All tools of a gateway. ``counts`` has finished calls by status, and ``infrastructure`` for those that had none."""

    def __init__(self, tools: Iterable[AnyTool], limits: Mapping[str, ToolConfig] | None = None) -> None:
        """Raises ``ConfigError`` for a tool that is none, a schema that cannot be checked, or limits of no tool."""
        limits = limits or {}
        self._tools: dict[str, RegisteredTool] = {}
        for tool in tools:
            registered = _registered(tool, limits.get(getattr(tool, "name", ""), ToolConfig()))
            if tool.name in self._tools:
                raise ConfigError(f"envgateway.tools: there are two tools named {tool.name!r}")
            self._tools[tool.name] = registered
        for name in limits:
            if name not in self._tools:
                raise ConfigError(f"envgateway.tools.limits.{name}: no such tool; there is {', '.join(self.names)}")
        self.counts: Counter[str] = Counter()

    @property
    def names(self) -> list[str]:
        return sorted(self._tools)

    def find(self, name: str) -> RegisteredTool | None:
        return self._tools.get(name)

    def schemas(self, names: Sequence[str]) -> list[Mapping[str, Any]]:
        """Raises ``InvalidRequestError`` for a tool that the gateway does not have."""
        for name in names:
            if name not in self._tools:
                raise InvalidRequestError(f"no tool {name!r}; the gateway has {', '.join(self.names)}")
        return [schema_of(self._tools[name].tool) for name in names]


def load_tools(paths: Iterable[str]) -> list[AnyTool]:
    """One object of each class. Loaded at start: a typo costs a second, not a run.

    Raises:
        ConfigError: naming the path and what is wrong with it.
    """
    return [load_object(path)() for path in paths]


def cut_result(result: ToolResult, config: ToolConfig, max_chars: int | None = None) -> ToolResult:
    """What of it the policy is shown; ``max_chars`` goes before the config's."""
    most = config.max_chars if max_chars is None else max_chars
    return ToolResult(status=result.status, text=cut_text(result.text, most, config.cut))


def _registered(tool: AnyTool, config: ToolConfig) -> RegisteredTool:
    for attribute in ("name", "description"):
        if not isinstance(getattr(tool, attribute, None), str):
            raise ConfigError(f"envgateway.tools: {type(tool).__name__}.{attribute} is missing or no text")
    if not callable(getattr(tool, "call", None)) and not callable(getattr(tool, "open", None)):
        raise ConfigError(f"envgateway.tools: {tool.name} has neither call() nor open()")
    try:
        check_schema(getattr(tool, "parameters", None))
    except ValueError as error:
        raise ConfigError(f"envgateway.tools: {tool.name}: {error}") from error
    own_s = getattr(tool, "timeout_s", DEFAULT_TIMEOUT_S)
    concurrency: int = config.concurrency or getattr(tool, "concurrency", None) or DEFAULT_CONCURRENCY
    return RegisteredTool(
        tool=tool,
        config=config,
        timeout_s=None if own_s is None else config.timeout_s or own_s,
        running=asyncio.Semaphore(concurrency),
    )
