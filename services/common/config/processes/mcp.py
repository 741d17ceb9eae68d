"""Settings of the MCP servers whose tools the gateway offers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from services.common.config.base import Section
from services.common.errors import ConfigError

MCP = "mcp:"  # begins the name of a server's tools: `mcp:SERVER` for all, `mcp:SERVER/TOOL` for one


class McpServerConfig(Section):
    command: list[str] = []
    """Program and arguments of a server over standard input and output, such as `[python, ./server.py]`: a path that
    begins with `./` is relative to the recipe's file, and `python` is the gateway's own. Give this or `url`."""
    url: str | None = None
    """Address of a server over streamable HTTP, such as `http://127.0.0.1:8000/mcp`."""
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
    concurrency: int = Field(default=64, ge=1)
    """Calls that run at once, over all rollouts."""
    max_chars: int = Field(default=4096, ge=64)
    """A longer result is cut, and its end says how many characters it had; a task's `max_response_chars` has precedence, and
    so has `workflow.settings.max_tool_response_chars`."""

    @model_validator(mode="after")
    def _one_way(self) -> McpServerConfig:
        if bool(self.command) == bool(self.url):
            given = "both are set" if self.url else "neither is set"
            raise ValueError(f"write either `command` (a program and its arguments) or `url`; {given}")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url is {self.url!r}: write an address that begins with http:// or https://")
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


def split_name(name: str) -> tuple[str, str]:
    """Server and tool of a name that begins with ``MCP``; the tool is empty for all of the server.

    >>> split_name("mcp:files"), split_name("mcp:files/read")
    (('files', ''), ('files', 'read'))
    """
    server, _, tool = name.removeprefix(MCP).partition("/")
    return server, tool
