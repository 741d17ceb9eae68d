"""Settings of the environment gateway."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from services.common.config.base import HttpService, Limits, Listening, OnNode, Port, Section
from services.common.errors import ConfigError

# --- Settings of the environments that the gateway offers.


class Timeouts(Section):
    """Of an environment in another process."""

    start_timeout_s: float = Field(default=50.0, gt=0)
    """Starting the process, connecting to it and beginning an episode may each take this long."""
    step_timeout_s: float = Field(default=50.0, gt=0)
    """One turn may take this long; then the episode is lost, and played again. Never a reward."""


class EnginePoolConfig(Timeouts):
    step_timeout_s: float = Field(default=20.0, gt=0)
    """A game that takes longer for one step is stalled: its process is killed. Never a reward."""
    num_workers: int = Field(default=2, ge=1)
    """Processes that hold games; started on first use."""


class WorldConfig(Section):
    max_turns: int = Field(default=50, ge=1)
    """Turns of an episode; a task's row may say otherwise."""


class GamesConfig(WorldConfig):
    games: Path | None = None
    """ALFWorld: a JSON file that lists games, relative to `data`: a list, or lists by name. TextWorld: a folder of game files
    (`.z8`; a `.json` of the same name beside it tells the possible actions). A task's `index` counts in this list, for a
    folder in its sorted one. Left out, ALFWorld has every game below `data`, sorted by path, which is not the order that
    the data sets `alfworld-train` and `alfworld-valid` count in; TextWorld makes games, and the `index` is their seed."""
    engine: EnginePoolConfig = EnginePoolConfig()
    """Processes of the engine."""


class AlfworldConfig(GamesConfig):
    data: Path | None = None
    """Folder of ALFWorld's data, which holds `json_2.1.1`."""


WebshopPage = Literal["text", "text_rich", "url"]


class WebshopConfig(WorldConfig):
    data: Path | None = None
    """Folder of the catalogue in WebShop's raw form: `items_shuffle*.json`, `items_ins_v2*.json`,
    `items_human_ins.json`."""
    goals: Path | None = None
    """JSON file with `goals` (in order) and `prices`; left out, both are drawn with WebShop's seed."""
    tagger: str = "words"
    """Words of a title that count as nouns: every word (`words`), or those of a tagger of spaCy (extra `webshop`), by the name
    of its model, such as `en_core_web_lg`, or its folder."""
    observation: WebshopPage = "text"
    """How a page is shown: as joined text, as text with marked buttons (AstraFlow's AgentBench does), or as its URL; a
    task's row may say otherwise."""
    max_turns: int = Field(default=10, ge=1)
    """Turns of an episode; a task's row may say otherwise."""


class AgentBenchConfig(Timeouts):
    url: str = "http://127.0.0.1:5000/api"
    """A classic AgentBench controller, or a task server that speaks the adapter's protocol."""
    task: str = ""
    """Name of the task at a classic controller; left out, its only one."""


PORT_MARK, PYTHON_MARK = "{port}", "{python}"  # in a command: a free port, the gateway's interpreter


class ServerSection(Section):
    """A server that runs elsewhere, or that the gateway starts."""

    url: str | None = None
    """Address of a running server, such as `http://127.0.0.1:8000` of OpenEnv, or `http://127.0.0.1:8000/mcp` of MCP over
    streamable HTTP."""
    command: list[str] = []
    """Instead of `url`: program and arguments. A path that begins with `./` is relative to the recipe's file. Of MCP, a server
    over standard input and output, such as `[python, ./server.py]`, where `python` is the gateway's own. Of OpenEnv, one
    that serves the environment at the port `{port}`, such as ["{python}", server.py, "{port}"], where `{python}` is the
    gateway's interpreter, or [docker, run, --rm, --publish, "{port}:8000", IMAGE]: started with the first episode, again
    after its end, ended with the gateway."""

    @model_validator(mode="after")
    def _one_server(self) -> ServerSection:
        if bool(self.command) == bool(self.url):
            given = "both are set" if self.url else "neither is set"
            raise ValueError(f"write either `command` (a program and its arguments) or `url`; {given}")
        if self.url and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url is {self.url!r}: write an address that begins with http:// or https://")
        return self


class OpenEnvConfig(ServerSection, Timeouts):
    action: str | None = None
    """Field of the action that the policy's text becomes. Left out: the action's only required field, where it is text; else the
    text must be a JSON object, the whole action."""
    observation: str | None = None
    """Field of the observation that the policy reads. Left out: its only text, else all of it as JSON."""

    @model_validator(mode="after")
    def _told_its_port(self) -> OpenEnvConfig:
        if self.command and not any(PORT_MARK in part for part in self.command):
            raise ValueError(f"command has no {PORT_MARK}, in place of which the server is told its port")
        return self


class ServedTaskConfig(Section):
    environment: str = ""
    """Environment of the gateway; left out, the task's own name."""
    end: int | None = Field(default=None, ge=1)
    """Samples: indices are the numbers below this one, and seed the episodes. Left out, those that the environment takes."""
    row: dict[str, Any] = {}
    """Goes into the row of every task, beside its `index`, such as `{environment: {max_turns: 20}}`."""


class TaskServerConfig(HttpService):
    port: Port | None = None
    """Also serve episodes as AgentBench's task servers do; their clients expect 5000, 0 takes a free port.
    Variable: TASK_SERVER_PORT."""
    environments: dict[str, ServedTaskConfig] = {}
    """Task name -> task. The first is also served without a name. Left out: every environment whose tasks are numbered."""


class GymnasiumConfig(Section):
    """An environment of the package gymnasium."""

    id: str
    """Name in gymnasium's registry, such as `FrozenLake-v1`; `package.module:Name-v0` imports the module that registers it."""
    settings: dict[str, Any] = {}
    """Keyword arguments of `gymnasium.make`, such as `{is_slippery: false, max_episode_steps: 20}`."""
    instruction: str = ""
    """Text before the first observation: the rules, and what to answer."""
    observation: str = "values"
    """How an observation becomes text: `values` (numbers, one part in a line), `render` (what `render_mode: ansi` draws), or
    the import path of a function `observation -> text`."""
    actions: list[str] | str = []
    """How a reply becomes an action of a discrete space: names in the order of the actions, of which the last one in the reply
    counts; or the import path of a function `reply -> action` (None where there is none). Left out, the last whole number."""
    num_envs: int | None = Field(default=None, ge=1)
    """Play so many copies in one episode, as `gymnasium.make_vec` makes them: the reply has an action for each, in lines `1:
    left`. The reward is the mean of their returns. Left out, one environment without a vector."""

    @model_validator(mode="after")
    def _can_be_read(self) -> GymnasiumConfig:
        if isinstance(self.actions, str) and ":" not in self.actions:
            raise ValueError(
                f"actions is {self.actions!r}: write a list of names, or an import path (package.module:function)"
            )
        if isinstance(self.actions, list):
            lowered = [name.strip().lower() for name in self.actions]
            if "" in lowered or len(set(lowered)) < len(lowered):
                raise ValueError(f"actions are {self.actions}: each needs a name of its own, without regard to case")
        if self.observation not in ("values", "render") and ":" not in self.observation:
            raise ValueError(
                f"observation is {self.observation!r}: write values, render, or an import path (package.module:function)"
            )
        if self.num_envs is not None and self.observation == "render":
            raise ValueError("observation is render, and a vector draws no text: write values, or an import path")
        return self


class HarborConfig(Section):
    """The environment that plays Harbor's task directories."""

    skip_run: bool = False
    """Play tasks whose Dockerfile has RUN, or which name an image, without these: the programs that they would bring are on the
    gateway's machine already, in /usr. Left at false, such tasks are left out and counted."""


# --- Settings of the MCP servers whose tools the gateway offers.


MCP = "mcp:"  # begins the name of a server's tools: `mcp:SERVER` for all, `mcp:SERVER/TOOL` for one


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


class HttpConfig(HttpService):
    port: Port | None = None
    """Also serve the HTTP interface that clients of Code Judge speak; they expect port 8000, 0 takes a free port.
    Variable: CODE_JUDGE_PORT."""
    reuse_port: bool = False
    """Let other gateways on this host serve the same port; the system spreads connections over them."""


class EnvGatewayConfig(Listening, OnNode):
    port: Port = 50080
    """gRPC port; 0 takes a free one. Variable: ENVGATEWAY_PORT."""
    sandbox: SandboxConfig = SandboxConfig()
    """Sandboxed execution."""
    queue: QueueConfig = QueueConfig()
    """Where programs wait for a slot, here or at workers."""
    http: HttpConfig = HttpConfig()
    """The HTTP interface of Code Judge."""
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
    mcp: dict[str, McpServerConfig] = {}
    """MCP servers whose tools policies may call (extra `mcp`): name -> server. `mcp:NAME` names all tools of a server, in
    `workflow.settings.tools` or a task's `environment.tools`; `mcp:NAME/TOOL` one of them."""
    environments: dict[str, str] = {}
    """More environments: name -> import path (`package.module:Class`). A name that Rollmill has itself is refused."""
    alfworld: AlfworldConfig = AlfworldConfig()
    """The environment `alfworld` (extra `alfworld`)."""
    textworld: GamesConfig = GamesConfig()
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
    """Episodes for trainers that play AgentBench's task servers, over HTTP."""
    max_episodes: int = Field(default=1024, ge=1)
    """Episodes open at once."""
    episode_lease_s: float = Field(default=300.0, gt=0)
    """An episode without a step for this long is closed."""

    @model_validator(mode="after")
    def _case_time_within_the_sandbox(self) -> EnvGatewayConfig:
        if self.code.case_time_s is not None:
            self.sandbox.check_case_time("envgateway.code.case_time_s", self.code.case_time_s)
        return self
