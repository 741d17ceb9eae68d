"""Settings of MCP servers, a section of ``envgateway``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from services.common.config.base import Section, ServerSection
from services.common.errors import ConfigError


class McpServerConfig(ServerSection):
    environment: dict[str, str] = {}
    """With `command`: variables of the server's process, besides HOME, LANG, PATH, USER and the like. A value `$NAME` is the
    gateway's own variable of that name, which keeps a secret out of the recipe."""
    directory: Path | None = None
    """With `command`: the directory in which the server starts; left out, the gateway's."""
    headers: dict[str, str] = {}
    """With `url`: headers of each request, such as `{Authorization: $SEARCH_TOKEN}`. A value `$NAME` is the gateway's own
    variable of that name."""
    sessions: Literal["episode", "shared"] = "episode"
    """`episode`: each rollout has a session of its own (with `command`, a process), so a server may keep state. `shared`: one
    session for all rollouts, for a server whose calls do not depend on each other; such a call is repeated after a failure."""
    max_sessions: int = Field(default=32, ge=1)
    """With `sessions: episode`: sessions at once. A rollout that finds none free waits."""
    tools: list[str] = []
    """Tools to offer, by the server's names; empty offers all."""
    prefix: str = ""
    """Begins the names under which policies see the tools, for two servers with tools of the same name."""
    start_timeout_s: float = Field(default=20.0, gt=0, le=45)
    """A server that has not listed its tools after this many seconds has failed."""
    timeout_s: float = Field(default=20.0, gt=0, le=45)
    """Seconds of one call. If the server answers other requests then, the call is a `time_limit`, which the policy is told
    (with `url` after a second try, for the answer may have been lost on the way); else the server hangs, gets a new session
    or process, and the call is an infrastructure failure."""
    max_chars: int = Field(default=4096, ge=64)
    """A longer result is cut, and its end says how many characters it had; a task's `max_response_chars` has precedence, and
    so has `workflow.settings.max_tool_response_chars`."""

    @model_validator(mode="after")
    def _settings_are_of_its_kind(self) -> McpServerConfig:
        foreign = ("environment", "directory") if self.url else ("headers",)
        for key in foreign:
            if getattr(self, key):
                raise ValueError(
                    f"{key} is set, and belongs to `{'command' if self.url else 'url'}`, which is not: leave {key} out"
                )
        return self


def with_variables(values: Mapping[str, str], where: str) -> dict[str, str]:
    """The values, with `$NAME` replaced by this process's variable.

    Raises:
        ConfigError: a variable that is not set; with the key.
    """
    found = {}
    for key, value in values.items():
        if value.startswith("$"):
            name = value[1:]
            if name not in os.environ:
                raise ConfigError(f"{where}.{key} is {value}, and the variable {name} is not set: export {name}")
            value = os.environ[name]
        found[key] = value
    return found


class McpSections(Section):
    mcp: dict[str, McpServerConfig] = {}
    """MCP servers whose tools policies may call (extra `mcp`): name -> server. `mcp:NAME` names all tools of a server, in
    `workflow.settings.tools` or a task's `environment.tools`; `mcp:NAME/TOOL` one of them."""
