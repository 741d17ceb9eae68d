"""Settings of the environments that the gateway offers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from services.common.config.base import Section


class EnginePoolConfig(Section):
    num_workers: int = Field(default=2, ge=1)
    """Processes that hold games; started on first use."""
    episodes_per_worker: int = Field(default=32, ge=1)
    """Games held by one process. They are lost with the process, so fewer is safer and more is cheaper."""
    step_timeout_s: float = Field(default=20.0, gt=0)
    """A game that takes longer for one step is stalled: its process is killed. Never a reward."""
    load_timeout_s: float = Field(default=50.0, gt=0)
    """The same for loading a game."""
    memory_bytes: int = Field(default=4 << 30, ge=256 << 20)
    """Address space of one process."""


class AlfworldConfig(Section):
    data: Path | None = None
    """Folder of ALFWorld's data, which holds `json_2.1.1`."""
    games: Path | None = None
    """JSON file that lists games, relative to `data`: a list, or lists by name. Left out: every game below `data`,
    sorted by path, which is not the order that the data sets `alfworld-train` and `alfworld-valid` count in. A task's
    `index` counts in this list."""
    max_turns: int = Field(default=50, ge=1)
    """Turns of an episode; a task's row may say otherwise."""
    engine: EnginePoolConfig = EnginePoolConfig()
    """Processes of the engine."""


class TextworldConfig(Section):
    games: Path | None = None
    """Folder of game files (`.z8`; a `.json` of the same name beside it tells the possible actions). A task's `index`
    counts in its sorted list. Left out: games are made, and the `index` is their seed."""
    cache: Path | None = None
    """Folder of games that are made on the fly; left out, one below the system's temporary folder."""
    max_turns: int = Field(default=50, ge=1)
    """Turns of an episode; a task's row may say otherwise."""
    make_timeout_s: float = Field(default=50.0, gt=0)
    """Making one game may take this long."""
    engine: EnginePoolConfig = EnginePoolConfig()
    """Processes of the engine."""


WebshopPage = Literal["text", "text_rich", "url"]


class WebshopConfig(Section):
    data: Path | None = None
    """Folder of the catalogue in WebShop's raw form: `items_shuffle*.json`, `items_ins_v2*.json`,
    `items_human_ins.json`."""
    goals: Path | None = None
    """JSON file with `goals` (in order) and `prices`; left out, both are drawn with `seed`."""
    num_products: int | None = Field(default=None, ge=1)
    """Products taken from the start of the catalogue; left out, all."""
    seed: int = 233
    """Seeds prices, price limits and the order of goals."""
    tagger: Literal["words", "spacy"] = "words"
    """Words of a title that count as nouns: every word, or those of spaCy's tagger (extra `webshop`)."""
    spacy_model: str = "en_core_web_sm"
    """With `tagger: spacy`."""
    observation: WebshopPage = "text"
    """How a page is shown: as joined text, as text with marked buttons (AstraFlow's AgentBench does), or as its URL; a
    task's row may say otherwise."""
    max_turns: int = Field(default=10, ge=1)
    """Turns of an episode; a task's row may say otherwise."""


class AgentBenchConfig(Section):
    url: str = "http://127.0.0.1:5000/api"
    """A classic AgentBench controller, or a task server that speaks the adapter's protocol."""
    protocol: Literal["auto", "classic", "adapter"] = "auto"
    """Left at auto, the server is asked once."""
    task: str = ""
    """Name of the task at a classic controller; left out, its only one."""
    start_timeout_s: float = Field(default=50.0, gt=0)
    """Starting a session may take this long."""
    step_timeout_s: float = Field(default=50.0, gt=0)
    """One turn may take this long."""
    connections: int = Field(default=256, ge=1)
    """Connections at once."""
    release_leaked_slots: bool = True
    """Ask a classic controller to synchronise with its workers after a task raised: the controller forgets the session,
    but still counts the slot."""


PORT_MARK, PYTHON_MARK = "{port}", "{python}"  # in a command: a free port, the gateway's interpreter


class OpenEnvConfig(Section):
    url: str | None = None
    """Address of an OpenEnv server, such as http://127.0.0.1:8000."""
    command: list[str] = []
    """Instead of `url`: a program and its arguments, or a container, that serves the environment at the port `{port}`, such as
    ["{python}", server.py, "{port}"], where `{python}` is the gateway's interpreter, or [docker, run, --rm, --publish,
    "{port}:8000", IMAGE]. Started with the first episode, again after its end, ended with the gateway."""
    action: str | None = None
    """Field of the action that the policy's text becomes. Left out: the action's only required field, where it is text; else the
    text must be a JSON object, the whole action."""
    observation: str | None = None
    """Field of the observation that the policy reads. Left out: its only text, else all of it as JSON."""
    start_timeout_s: float = Field(default=50.0, gt=0)
    """Opening the socket, starting the command, and `reset` may each take this long."""
    step_timeout_s: float = Field(default=50.0, gt=0)
    """One turn may take this long; then the episode is lost, and played again."""
    connections: int = Field(default=256, ge=1)
    """Sockets open at once, one for each episode."""

    @model_validator(mode="after")
    def _one_server(self) -> OpenEnvConfig:
        if (self.url is None) == (not self.command):
            raise ValueError("set `url` (a running server) or `command` (a program that serves), and not both")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url is {self.url!r}; must begin with http:// or https://")
        if self.command and not any(PORT_MARK in part for part in self.command):
            raise ValueError(f"command has no {PORT_MARK}, in place of which the server is told its port")
        return self


class ServedTaskConfig(Section):
    environment: str = ""
    """Environment of the gateway; left out, the task's own name."""
    first: int = Field(default=0, ge=0)
    """Leaves out the indices before this place in the environment's list."""
    end: int | None = Field(default=None, ge=1)
    """Leaves out the indices from this place on. An environment that cannot list its tasks needs this number: its
    indices are the numbers up to here, and seed the episodes."""
    concurrency: int = Field(default=256, ge=1)
    """Conversations at once."""
    row: dict[str, Any] = {}
    """Goes into the row of every task, beside its `index`, such as `{environment: {max_turns: 20}}`."""


class TaskServerConfig(Section):
    port: int | None = Field(default=None, ge=0, le=65535)
    """Also serve episodes over the HTTP protocols of AgentBench; its clients expect 5000, 0 takes a free port.
    Variable: TASK_SERVER_PORT."""
    environments: dict[str, ServedTaskConfig] = {}
    """Task name -> task. The first is also served without a name. Left out: every environment that can list its
    tasks."""
    body_bytes: int = Field(default=16 * 1024 * 1024, ge=1024)
    """Largest request."""


class GymnasiumConfig(Section):
    """An environment of the package gymnasium."""

    id: str
    """Name in gymnasium's registry, such as `FrozenLake-v1`; `package.module:Name-v0` imports the module that registers it."""
    settings: dict[str, Any] = {}
    """Keyword arguments of `gymnasium.make`, such as `{is_slippery: false}`."""
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
    vectorization: Literal["sync", "async", "vector_entry_point"] | None = None
    """With `num_envs`: gymnasium's way; left out, the environment's own."""
    max_turns: int | None = Field(default=None, ge=1)
    """Turns of an episode (`max_episode_steps`); left out, those of the registry, and those of the workflow."""

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
        if self.vectorization is not None and self.num_envs is None:
            raise ValueError("vectorization is set, and num_envs is not: write num_envs, or leave vectorization out")
        if self.num_envs is not None and self.observation == "render":
            raise ValueError("observation is render, and a vector draws no text: write values, or an import path")
        return self


class HarborConfig(Section):
    """The environment that plays Harbor's task directories."""

    skip_run: bool = False
    """Play tasks whose Dockerfile has RUN, or which name an image, without these: the programs that they would bring are on the
    gateway's machine already, in /usr. Left at false, such tasks are left out and counted."""
    command_time_s: float = Field(default=30.0, gt=0, le=45)
    """Wall-clock time of one command; then it is stopped, and the agent is told."""
    verifier_time_s: float = Field(default=45.0, gt=0, le=45)
    """Largest wall-clock time of tests/test.sh; a task's `verifier.timeout_sec` may be less. Tests that take longer give no
    reward."""
    agent_time_s: float = Field(default=3600.0, gt=0)
    """Largest wall-clock time of a task before its tests; a task's `agent.timeout_sec` may be less. The first turn after
    that ends the task, and the tests run."""
    cpu_time_s: float = Field(default=600.0, gt=0)
    """CPU time of all commands and the tests of a task together."""
    memory_bytes: int = Field(default=1 << 30, ge=64 << 20)
    """Largest memory of a task; its `environment.memory_mb` may be less."""
    disk_bytes: int = Field(default=256 << 20, ge=1 << 20)
    """Largest size of all files of a task, which are in memory too; its `environment.storage_mb` may be less."""
    num_files: int = Field(default=8192, ge=64)
    """Most files and directories of a task."""
    num_processes: int = Field(default=64, ge=8)
    """Most processes and threads of a task."""
    open_files: int = Field(default=256, ge=32)
    """Most open files of one process."""
    output_bytes: int = Field(default=1 << 20, ge=4096)
    """Bytes that one command may print; then it is stopped."""
    max_chars: int = Field(default=4000, ge=64)
    """A longer output of a command is cut in its middle before the agent reads it."""
    files_bytes: int = Field(default=32 << 20, ge=1024)
    """Largest size of a task's `environment`, and of its `tests`."""
