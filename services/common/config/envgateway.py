"""Settings of the environment gateway."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, create_model, model_validator

from services.common.config.base import Limits, Listening, OnNode, Port, Section
from services.common.extras import load_extra, provided

MCP = "mcp:"  # begins the name of a server's tools: `mcp:SERVER` for all, `mcp:SERVER/TOOL` for one


def split_name(name: str) -> tuple[str, str]:
    """Server and tool of a name that begins with ``MCP``; the tool is empty for all of the server.

    >>> split_name("mcp:files"), split_name("mcp:files/read")
    (('files', ''), ('files', 'read'))
    """
    server, _, tool = name.removeprefix(MCP).partition("/")
    return server, tool


class SandboxConfig(Limits):
    tier: Literal["auto", "2", "1", "U", "0"] = "auto"
    """Isolation tier: the strongest that works here (auto), or exactly this one."""
    allow_tier_0: bool = False
    """Run code with resource limits only, without isolation, where no stronger tier works. Trusted code only!"""
    num_slots: int = Field(default=4, ge=1)
    """Programs run at once."""
    wall_time_s: float = Field(default=5.0, gt=0)
    """Largest wall-clock time of one program."""
    num_processes: int = Field(default=16, ge=1)
    """Most processes and threads of one program."""
    judging_time_s: float = Field(default=300.0, gt=0, le=500)
    """Largest time of all cases of one judgement together; those that are left then are not run, and are a `TIME_LIMIT`."""
    file_bytes: int = Field(default=16 * 1024 * 1024, ge=0)
    """Largest file that a program may write."""
    disk_bytes: int = Field(default=64 * 1024 * 1024, ge=65536)
    """All files of one program together."""
    packages: list[str] = ["numpy", "sympy", "mpmath", "sortedcontainers"]
    """Packages of the gateway's own environment that programs may import; those that are not installed are left out."""
    prewarm_scientific: bool = True
    """Keep a fork server with numpy and sympy loaded from the start on, rather than from the first use."""
    num_live: int = Field(default=32, ge=0)
    """Processes that live on between calls, beside the slots: one for each trajectory that uses `jupyter_code`."""

    def check_case_time(self, key: str, case_time_s: float) -> None:
        """Raises ``ValueError`` when the sandbox stops a program before the time of a test case is over."""
        for name in ("wall_time_s", "cpu_time_s"):
            limit = getattr(self, name)
            if case_time_s > limit:
                raise ValueError(
                    f"{key} is {case_time_s:g}, but envgateway.sandbox.{name} is {limit:g} and would stop a program after "
                    f"{limit:g} s: raise envgateway.sandbox.{name} to {case_time_s:g}, or lower {key} to {limit:g}"
                )


class LiveConfig(Limits):
    """Limits of one process that lives on between calls; processes, files and disk are limited as for programs."""

    cell_time_s: float = Field(default=10.0, gt=0, le=45)
    """Wall-clock time of one cell; then the cell is interrupted, and killed if still running."""
    cpu_time_s: float = Field(default=120.0, gt=0)
    """CPU time of all cells together, and of threads and children between them."""
    lifetime_s: float = Field(default=3600.0, gt=0)
    """Wall-clock time from the first cell on."""


class ToolsConfig(Section):
    paths: list[str] = []
    """More tools: import paths of functions with `@rollmill.tool`, or of classes (`package.module:name`)."""
    jupyter: LiveConfig = LiveConfig()
    """The process that a trajectory has for `jupyter_code`."""


class ScorerConfig(Section):
    """Processes that score answers with a package that may take for ever."""

    num_workers: int = Field(default=1, ge=1)
    """Processes, started on first use."""
    timeout_s: float = Field(default=5.0, gt=0)
    """CPU time of one score. An answer that takes more gets the reward 0, and its worker is replaced."""


class CodeRewardConfig(Section):
    case_time_s: float | None = Field(default=None, gt=0)
    """Time of a program on one test case of the reward `code`; left out, `sandbox.wall_time_s`, which is also the largest."""


class QueueConfig(Section):
    redis_uri: str = ""
    """Send jobs to workers over this Redis, such as redis://127.0.0.1:6379; empty: run them here. The variable REDIS_URI
    (or REDIS_URL) says the same, and keeps a password out of the recipe."""
    redis_prefix: str = "rollmill"
    """Begins every key in Redis; gateways and workers with the same prefix work together."""
    allow_plain_redis: bool = False
    """Use a Redis on another machine without TLS: jobs and verdicts can then be read and changed on the way."""
    lease_s: float = Field(default=10.0, ge=0.5)
    """A worker that has not been heard of for this long loses its jobs to others."""


if TYPE_CHECKING:
    OfExtras = Section
else:
    OfExtras = create_model(
        "OfExtras", __base__=(*(load_extra("settings", name) for name in provided("settings")), Section)
    )


class EnvGatewayConfig(Listening, OnNode, OfExtras):
    """Has the sections of the extras, too: an extra reads the config as its own class of sections."""

    port: Port = 50080
    """gRPC port; 0 takes a free one. Variable: ENVGATEWAY_PORT."""
    sandbox: SandboxConfig = SandboxConfig()
    """Sandboxed execution."""
    queue: QueueConfig = QueueConfig()
    """Where programs wait for a slot, here or at workers."""
    math: ScorerConfig = ScorerConfig()
    """Math rewards (Math-Verify)."""
    code: CodeRewardConfig = CodeRewardConfig()
    """The reward `code`."""
    reasoning_gym: ScorerConfig = ScorerConfig()
    """The reward `reasoning_gym` (extra `reasoning-gym`)."""
    rewards: list[str] = []
    """More rewards that callers may name: import paths of functions (`package.module:function`)."""
    tools: ToolsConfig = ToolsConfig()
    """Tools that policies may call."""
    environments: dict[str, str] = {}
    """More environments: name -> import path (`package.module:Class`). A name that Rollmill has itself is refused."""
    max_episodes: int = Field(default=1024, ge=1)
    """Episodes open at once."""
    episode_lease_s: float = Field(default=300.0, gt=0)
    """An episode without a step for this long is closed."""

    def extra(self, section: str) -> Any:
        """The settings of an extra; None where its folder is not installed."""
        return getattr(self, section, None)

    @model_validator(mode="after")
    def _case_time_within_the_sandbox(self) -> EnvGatewayConfig:
        if self.code.case_time_s is not None:
            self.sandbox.check_case_time("envgateway.code.case_time_s", self.code.case_time_s)
        return self
