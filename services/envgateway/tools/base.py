"""Tools of the gateway: those of ``services.common.tools``, and the error of a state that is lost.

    StateLostError        the machinery has lost a state: the trajectory cannot go on

The config's ``tools.limits`` go before a tool's own ``timeout_s`` and ``concurrency``.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from services.common.config.processes.envgateway import ToolConfig
from services.common.errors import InfrastructureError
from services.common.tools import AnyTool


class StateLostError(InfrastructureError):
    """The machinery has lost a trajectory's tool state: a repeated call does not restore the state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredTool:
    """A tool with its limits."""

    tool: AnyTool
    config: ToolConfig
    timeout_s: float | None  # None: the tool keeps its own
    running: asyncio.Semaphore
    has_state: bool  # of each trajectory's own
