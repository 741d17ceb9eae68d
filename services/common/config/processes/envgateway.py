"""Settings of the environment gateway."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from services.common.config.base import Section
from services.common.config.processes.environments import (
    AgentBenchConfig,
    AlfworldConfig,
    GymnasiumConfig,
    HarborConfig,
    OpenEnvConfig,
    TaskServerConfig,
    TextworldConfig,
    WebshopConfig,
)
from services.common.config.processes.mcp import McpServerConfig


class SandboxConfig(Section):
    tier: Literal["auto", "2", "1", "U", "0"] = "auto"
    """Isolation tier: the strongest that works here (auto), or exactly this one."""
    allow_tier_0: bool = False
    """Run code with resource limits only, without isolation, where no stronger tier works. Trusted code only!"""
    num_slots: int = Field(default=4, ge=1)
    """Programs run at once."""
    wall_time_s: float = Field(default=5.0, gt=0)
    """Largest wall-clock time of one program."""
    cpu_time_s: float = Field(default=5.0, gt=0)
    """Largest CPU time of one program and its children."""
    memory_bytes: int = Field(default=512 * 1024 * 1024, ge=1024 * 1024)
    """Largest memory of one program and its children together."""
    memory_cgroup: bool = True
    """Let the kernel enforce the memory limit where cgroups are available; otherwise the supervisor measures processes,
    and large shared mappings are refused. `sandbox_memory_cgroup` in GetStatus names the one in use."""
    num_processes: int = Field(default=16, ge=1)
    """Most processes and threads of one program."""
    judging_time_s: float = Field(default=300.0, gt=0, le=500)
    """Largest time of all cases of one judgement together; those that are left then are not run, and are a `TIME_LIMIT`."""
    output_bytes: int = Field(default=65536, ge=1)
    """Bytes kept of each of stdout and stderr."""
    file_bytes: int = Field(default=16 * 1024 * 1024, ge=0)
    """Largest file that a program may write."""
    disk_bytes: int = Field(default=64 * 1024 * 1024, ge=65536)
    """All files of one program together."""
    num_files: int = Field(default=1024, ge=1)
    """Most files and directories of one program."""
    answer_bytes: int = Field(default=8 * 1024 * 1024, ge=1024)
    """Largest returned value, and largest output of a judged program with a longer expected output than usual."""
    compile_time_s: float = Field(default=20.0, gt=0)
    """Largest wall-clock and CPU time of a compiler."""
    compile_memory_bytes: int = Field(default=1024 * 1024 * 1024, ge=64 * 1024 * 1024)
    """Largest memory of a compiler."""
    packages: list[str] = ["numpy", "sympy", "mpmath", "sortedcontainers"]
    """Packages of the gateway's own environment that programs may import; those that are not installed are left out."""
    fork_server_runs: int = Field(default=10_000, ge=1)
    """A fork server is replaced after this many programs, or after growth by 64 MiB."""
    prewarm_scientific: bool = True
    """Keep a fork server with numpy and sympy loaded from the start on, rather than from the first use."""
    num_live: int = Field(default=32, ge=0)
    """Processes that live on between calls, beside the slots: one for each trajectory that uses `jupyter_code`."""
    queue_size: int = Field(default=4096, ge=1)
    """Programs waiting for a slot, before callers are told to come back."""

    def check_case_time(self, key: str, case_time_s: float) -> None:
        """Raises ``ValueError`` when the sandbox stops a program before the time of a test case is over."""
        for name in ("wall_time_s", "cpu_time_s"):
            limit = getattr(self, name)
            if case_time_s > limit:
                raise ValueError(
                    f"{key} is {case_time_s:g}, but envgateway.sandbox.{name} is {limit:g} and would stop a program after "
                    f"{limit:g} s: raise envgateway.sandbox.{name} to {case_time_s:g}, or lower {key} to {limit:g}"
                )


class LiveConfig(Section):
    """Limits of one process that lives on between calls; processes, files and disk are limited as for programs."""

    cell_time_s: float = Field(default=10.0, gt=0, le=45)
    """Wall-clock time of one cell; then the cell is interrupted, and killed if still running."""
    cpu_time_s: float = Field(default=120.0, gt=0)
    """CPU time of all cells together, and of threads and children between them."""
    lifetime_s: float = Field(default=3600.0, gt=0)
    """Wall-clock time from the first cell on."""
    memory_bytes: int = Field(default=512 * 1024 * 1024, ge=1024 * 1024)
    """Memory of the process and its children together."""
    output_bytes: int = Field(default=65536, ge=1)
    """Bytes that a cell may print on each of stdout and stderr; then the cell is interrupted."""


class ToolConfig(Section):
    timeout_s: float | None = Field(default=None, gt=0, le=45)
    """Wall-clock time of one call; left out, the tool's own: 30 s, `sandbox.wall_time_s` for programs,
    `tools.jupyter.cell_time_s` for `jupyter_code`."""
    concurrency: int | None = Field(default=None, ge=1)
    """Calls that run at once; left out, the tool's own: 64, `sandbox.num_slots` for `jupyter_code`."""
    max_chars: int = Field(default=256, ge=16)
    """A longer response is cut; a task's `max_response_chars` has precedence."""
    cut: Literal["start", "middle", "end"] = "middle"
    """Place of the cut."""


class ToolsConfig(Section):
    paths: list[str] = []
    """More tools: import paths of functions with `@rollmill.tool`, or of classes (`package.module:name`)."""
    limits: dict[str, ToolConfig] = {}
    """Limits of tools by name."""
    jupyter: LiveConfig = LiveConfig()
    """The process that a trajectory has for `jupyter_code`."""


class MathRewardConfig(Section):
    num_workers: int = Field(default=1, ge=1)
    """Math-Verify processes; started on first use."""
    timeout_s: float = Field(default=5.0, gt=0)
    """CPU time of one grading. An answer that takes more gets the reward 0, and its worker is replaced."""


class ReasoningGymConfig(Section):
    num_workers: int = Field(default=1, ge=1)
    """Processes that score with reasoning-gym; started on first use."""
    timeout_s: float = Field(default=5.0, gt=0)
    """CPU time of one score. An answer that takes more gets the reward 0, and its worker is replaced."""


class CodeRewardConfig(Section):
    case_time_s: float | None = Field(default=None, gt=0)
    """Time of a program on one test case of the reward `code`; left out, `sandbox.wall_time_s`, which is also the largest."""


class QueueConfig(Section):
    lane_size: int = Field(default=4096, ge=1)
    """Jobs waiting in each lane, before callers are told to come back."""
    redis_uri: str = ""
    """Send jobs to workers over this Redis, such as redis://127.0.0.1:6379; empty: run them here. The variable REDIS_URI
    (or REDIS_URL) says the same, and keeps a password out of the recipe."""
    redis_prefix: str = "rollmill"
    """Begins every key in Redis; gateways and workers with the same prefix work together."""
    allow_plain_redis: bool = False
    """Use a Redis on another machine without TLS: jobs and verdicts can then be read and changed on the way."""
    lease_s: float = Field(default=10.0, ge=0.5)
    """A worker that has not been heard of for this long loses its jobs to others."""
    max_attempts: int = Field(default=3, ge=1)
    """A job that this many workers could not finish is an infrastructure failure; the last attempt is made alone."""


class HttpConfig(Section):
    port: int | None = Field(default=None, ge=0, le=65535)
    """Also serve the HTTP interface that clients of Code Judge speak; they expect port 8000, 0 takes a free port.
    Variable: CODE_JUDGE_PORT."""
    reuse_port: bool = False
    """Let other gateways on this host serve the same port; the system spreads connections over them."""
    queue_wait_s: float = Field(default=20.0, gt=0)
    """A single run, or one of a batch, that finds no slot for this long is answered with `queue_timeout`; one of a long batch after an hour."""
    body_bytes: int = Field(default=256 * 1024 * 1024, ge=1024)
    """Largest request."""


class EnvGatewayConfig(Section):
    host: str = "127.0.0.1"
    """Bind address. Another than loopback needs keys (`rollmill keys`, docs/security.md)."""
    port: int = Field(default=50080, ge=0, le=65535)
    """gRPC port; 0 takes a free one. Variable: ENVGATEWAY_PORT."""
    node: int = Field(default=0, ge=0)
    """The node of the gateway, and of environments, rewards and programs. On another node than 0 the gateway reports
    its own address for replicas, `host` is left out, and no task is issued until the gateway has joined."""
    sandbox: SandboxConfig = SandboxConfig()
    """Sandboxed execution."""
    queue: QueueConfig = QueueConfig()
    """Where programs wait for a slot, here or at workers."""
    http: HttpConfig = HttpConfig()
    """The HTTP interface of Code Judge."""
    math: MathRewardConfig = MathRewardConfig()
    """Math rewards."""
    code: CodeRewardConfig = CodeRewardConfig()
    """The reward `code`."""
    reasoning_gym: ReasoningGymConfig = ReasoningGymConfig()
    """The reward `reasoning_gym` (extra `reasoning-gym`)."""
    rewards: list[str] = []
    """More rewards that callers may name: import paths of functions (`package.module:function`)."""
    tools: ToolsConfig = ToolsConfig()
    """Tools that policies may call."""
    mcp: dict[str, McpServerConfig] = {}
    """MCP servers whose tools policies may call (extra `mcp`): name -> server. `mcp:NAME` names all tools of a server, in
    `workflow.settings.tools` or a task's `environment.tools`; `mcp:NAME/TOOL` one of them."""
    environments: dict[str, str] = {}
    """More environments: name -> import path (`package.module:Class`). A name that Rollmill has itself is refused."""
    alfworld: AlfworldConfig = AlfworldConfig()
    """The environment `alfworld` (extra `alfworld`)."""
    textworld: TextworldConfig = TextworldConfig()
    """The environment `textworld` (extra `textworld`)."""
    webshop: WebshopConfig = WebshopConfig()
    """The environment `webshop`."""
    agentbench: dict[str, AgentBenchConfig] = {}
    """Environments that AgentBench servers play: name -> server."""
    openenv: dict[str, OpenEnvConfig] = {}
    """Environments that OpenEnv servers play: name -> server."""
    gymnasium: dict[str, GymnasiumConfig] = {}
    """Environments of gymnasium's registry (extra `gymnasium`): name -> environment."""
    harbor: HarborConfig = HarborConfig()
    """The environment `harbor`, which plays task directories of `data.train.harbor`."""
    task_server: TaskServerConfig = TaskServerConfig()
    """Episodes for AgentBench's clients over HTTP."""
    max_episodes: int = Field(default=1024, ge=1)
    """Episodes open at once."""
    episode_lease_s: float = Field(default=300.0, gt=0)
    """An episode without a step for this long is closed."""

    @model_validator(mode="after")
    def _case_time_within_the_sandbox(self) -> EnvGatewayConfig:
        if self.code.case_time_s is not None:
            self.sandbox.check_case_time("envgateway.code.case_time_s", self.code.case_time_s)
        return self
