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
