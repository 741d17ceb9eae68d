"""Settings of the worlds, sections of ``envgateway``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from services.common.config.base import HttpService, Port, Section, Timeouts


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


class WorldsSections(Section):
    alfworld: AlfworldConfig = AlfworldConfig()
    """The environment `alfworld` (extra `alfworld`)."""
    textworld: GamesConfig = GamesConfig()
    """The environment `textworld` (extra `textworld`)."""
    webshop: WebshopConfig = WebshopConfig()
    """The environment `webshop`."""
    agentbench: dict[str, AgentBenchConfig] = {}
    """Environments that AgentBench servers play: name -> server."""
    task_server: TaskServerConfig = TaskServerConfig()
    """Episodes for trainers that play AgentBench's task servers, over HTTP."""
