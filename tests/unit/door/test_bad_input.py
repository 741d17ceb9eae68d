"""Faults of a user's code are reported with file, line and correction."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.cli.check.recipe import check_named
from services.common import importing
from services.common.config.data import DatasetConfig, WorkflowConfig
from services.common.config.loading import load_recipe, read_yaml
from services.common.errors import ConfigError, RollmillError
from services.common.tools import load_tools
from services.envgateway.envs.base import EnvironmentContext
from services.envgateway.envs.episodes import EnvironmentRegistry
from services.envgateway.rewards.registry import Rewards
from services.envgateway.tools.registry import ToolBox
from services.inference.engine.streaming import check_engine
from services.inference.workflows.base import build_grader
from services.inference.workflows.registry import build_workflow
from services.inference.workflows.tools import build_tools
from services.orchestrator.tasks.datasets import open_source
from services.trainer.losses import loss_by_path

MODULE = """\
import rollmill

def no_completion(task): return 1.0

def needs_more(task, completion, scale): return 1.0

def rows(count): yield {}

def loss(tokens): ...

class NoRun(rollmill.Workflow):
    pass

class RunsAlone(rollmill.Workflow):
    async def run(self, task): ...

class RunsAtOnce(rollmill.Workflow):
    def run(self, task, context): ...

class NoTokens(rollmill.Engine):
    pass

class TokensAlone(rollmill.Engine):
    async def tokens(self): yield 1, 0.0

class TokensInOne(rollmill.Engine):
    async def tokens(self, request): return [(1, 0.0)]

def no_rows(seed): return 3

def no_mappings(seed): yield 3

class NoStep(rollmill.Environment):
    def reset(self, task, seed): ...

class OldStep(rollmill.Environment):
    def reset(self, task, seed): ...
    def step(self, action, turn): ...

def plain(text: str) -> str:
    "A function that is not decorated."

@rollmill.tool(name="same")
def first(text: str) -> str:
    "One."

@rollmill.tool(name="same")
def second(text: str) -> str:
    "Another."

@rollmill.tool
def with_gateway(text: str, gateway: rollmill.Gateway) -> str:
    "Runs in the replica alone."

class OldTool:
    schema = {"type": "function", "function": {"name": "old"}}

    async def call(self, arguments, gateway): ...

class NeedsUrl(OldTool):
    def __init__(self, url): ...

number = 3
"""


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(MODULE.splitlines(), start=1) if line.startswith(text))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "faulty.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(importing, "_directories", [])
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


def environment(path: str) -> EnvironmentRegistry:
    return EnvironmentRegistry({"faulty": path}, EnvironmentContext(None, None))  # type: ignore[arg-type]


def workflow(path: str) -> object:
    return build_workflow(WorkflowConfig(name=path))


def rewards(path: str) -> object:
    return Rewards(None, paths=[path])  # type: ignore[arg-type]


def gateway_tools(*paths: str) -> object:
    return ToolBox(load_tools(paths))


def engine(path: str) -> object:
    check_engine(importing.load_object(path), path)
    return path


def dataset(path: str) -> object:
    return open_source(DatasetConfig(generator=path), seed=0)


@pytest.mark.parametrize(
    ("use", "path", "line", "told"),
    [
        (build_grader, "faulty:no_completion", "def no_completion", "`no_completion(task)`.*write `def reward(task, completion) -> float`"),
        (build_grader, "faulty:needs_more", "def needs_more", "missing a required argument: 'scale'"),
        (rewards, "faulty:no_completion", "def no_completion", "write `def reward(task, completion) -> float`"),
        (dataset, "faulty:rows", "def rows", "write `def rows(seed)`"),
        (loss_by_path, "faulty:loss", "def loss", "write `def loss(tokens, settings) -> PolicyLoss`"),
        (workflow, "faulty:NoRun", "class NoRun", "lacks a method: write `async def run(self, task, context) -> Outcome`"),
        (workflow, "faulty:RunsAlone", "    async def run(self, task)", "write `async def run(self, task, context) -> Outcome`"),
        (workflow, "faulty:RunsAtOnce", "    def run(self, task, context)", "no coroutine function: write `async def run(self, task, context) -> Outcome`"),
        (engine, "faulty:NoTokens", "class NoTokens", "lacks a method: write `async def tokens(self, request)` with `yield`"),
        (engine, "faulty:TokensAlone", "    async def tokens(self):", "write `async def tokens(self, request)`"),
        (engine, "faulty:TokensInOne", "    async def tokens(self, request)", "no async generator: write `async def tokens(self, request)` with `yield`"),
        (dataset, "faulty:no_rows", "def no_rows", "raised TypeError"),
        (dataset, "faulty:no_mappings", "def no_mappings", "row 1: a row must be a mapping, not int"),
        (environment, "faulty:NoStep", "class NoStep", "lacks a method: write `def step(self, action) -> StepResult`"),
        (environment, "faulty:OldStep", "    def step(self, action, turn)", "write `def step(self, action) -> StepResult`"),
        (gateway_tools, "faulty:plain", "def plain", "write `@rollmill.tool` above it"),
        (gateway_tools, "faulty:OldTool", "class OldTool", 'OldTool.name is missing or no text: write `name = "..."`'),
        (gateway_tools, "faulty:NeedsUrl", "class NeedsUrl", "missing a required argument: 'url'"),
        (lambda path: build_tools([path]), "faulty:OldTool", "class OldTool", "OldTool.name is missing"),
        (gateway_tools, "faulty:with_gateway", "@rollmill.tool\ndef with_gateway", "name it there"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_told_with_its_line(
    use: Callable[[str], object], path: str, line: str, told: str, folder: Path
) -> None:
    with pytest.raises(RollmillError) as caught:
        use(path)
    start = line.partition("\n")[2] or line
    number = line_of(start) - line.count("\n")
    assert caught.value.message.startswith(f"{folder}/faulty.py:{number}: "), caught.value.message
    for part in told.split(".*"):
        assert part in caught.value.message


@pytest.mark.parametrize(
    "use",
    [lambda: gateway_tools("faulty:first", "faulty:second"), lambda: build_tools(["faulty:first", "faulty:second"])],
)
def test_two_tools_of_one_name_are_told_with_both_places(use: Callable[[], object], folder: Path) -> None:
    first, second = line_of("def first") - 1, line_of("def second") - 1
    told = (
        rf"two named 'same', {folder}/faulty.py:{first} and {folder}/faulty.py:{second}: give one of them another name"
    )
    with pytest.raises(ConfigError, match=told):
        use()


def test_a_built_in_tool_is_not_replaced_without_a_word() -> None:
    with pytest.raises(ConfigError, match="two named 'python_code_with_standard_io'"):
        build_tools(["python_code_with_standard_io", "python_code_with_standard_io"])


def test_what_is_no_function_is_told_with_its_type() -> None:
    with pytest.raises(ConfigError, match="faulty:number is of type int, and no function: write `def reward"):
        build_grader("faulty:number")


RECIPE = """\
name: faulty
run: {steps: 0}
policies:
  model0: {model: {path: none, context_length: 2048}, trainer: {port: 0}, weights: {port: 0}}
data:
  train: {generator: "faulty:tasks"}
  evaluation: {test: {generator: "faulty:tasks"}}
inference: {a: {port: 0, engine: scripted}}
envgateway: null
workflow:
  name: single_turn
  settings:
    reward: NAME
"""


def test_a_key_that_stands_twice_is_told_with_both_lines(folder: Path) -> None:
    file = folder / "twice.yaml"
    file.write_text(
        "name: a\nenvgateway:\n  environments:\n    guess: faulty:A\n    walk: faulty:B\n    guess: faulty:C\n"
    )
    with pytest.raises(ConfigError, match=rf"{file}:6: envgateway.environments.guess is there twice, first in line 4"):
        read_yaml(file)


@pytest.mark.parametrize("text", ["a: [1", "a: &x {b: *y}", "\x00", "? [1, 2]\n: 3\n- 4"])
def test_what_is_no_yaml_is_told_with_its_file(text: str, folder: Path) -> None:
    (folder / "broken.yaml").write_text(text)
    with pytest.raises(ConfigError, match=rf"{folder}/broken.yaml is not valid YAML"):
        read_yaml(folder / "broken.yaml")


def test_a_recipe_names_modules_of_its_own_folder_wherever_it_is_started(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "beside.py").write_text(
        "def tasks(seed):\n    yield {'question': 'Two?', 'answer': '2'}\n\n\ndef right(task, completion):\n    return 1.0\n"
    )
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.replace("NAME", "beside:right").replace("faulty:tasks", "beside:tasks"))
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    loaded = load_recipe(recipe, (), {})
    assert loaded.modules == [str(folder)]
    check_named(loaded)
    (folder / "__init__.py").touch()  # a package is imported as one
    assert load_recipe(recipe, (), {}).modules == []


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("inference.a={engine: vlm, port: 0}", "no engine 'vlm'; write one of torch, forced, scripted, sglang, vllm, or an import path"),
        ("inference.a={engine: torch, engine_settings: {a: 1}, port: 0}", "engine_settings are for an engine that is named by import path"),
        ("inference.a.engine=faulty:Gone", "faulty has no 'Gone'"),
    ],
)  # fmt: skip
def test_a_class_that_cannot_be_used_is_refused_before_a_process_starts(override: str, told: str, folder: Path) -> None:
    with (folder / "faulty.py").open("a") as module:
        module.write("\ndef tasks(seed):\n    yield {'question': 'Two?', 'answer': '2'}\n")
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.replace("NAME", "math").replace("envgateway: null\n", ""))
    with pytest.raises(ConfigError, match=told):
        check_named(load_recipe(recipe, (override,), {}))


def test_an_environment_with_the_name_of_a_built_in_one_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"envgateway\.environments\.tool: Rollmill has an environment of this name"):
        EnvironmentRegistry({"tool": "faulty:NoStep"}, EnvironmentContext(None, None))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("environments.maze=faulty:Maze", r"envgateway\.environments\.maze: .*faulty has no 'Maze'"),
        (
            'tools.paths=["faulty:first", "gone:tool"]',
            r"envgateway\.tools\.paths\[1\]: gone:tool: there is no module 'gone'",
        ),
        ('rewards=["faulty.deep:reward"]', r"envgateway\.rewards\[0\]: faulty\.deep:reward: there is no module"),
    ],
)
def test_what_the_gateway_cannot_find_is_told_before_it_starts(setting: str, told: str, folder: Path) -> None:
    (folder / "recipe.yaml").write_text(
        RECIPE.replace("NAME", "faulty:needs_more").replace("envgateway: null", "envgateway: {}")
    )
    with pytest.raises(ConfigError, match=told):
        check_named(load_recipe(folder, [f"envgateway.{setting}"], {}))
