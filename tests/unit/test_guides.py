"""The guides of docs/: the files that they show are written out and used; the errors that they show are those of `rollmill`.

A fenced block with a title is a file. A block of the language `console` is a command with its whole output.
"""

from __future__ import annotations

import asyncio
import runpy
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from services.cli.__main__ import app
from services.common.config.loading import load_recipe
from services.common.errors import RollmillError
from services.common.importing import load_object
from services.envgateway.envs.base import StepResult
from services.inference.workflows.registry import build_workflow
from services.trainer.losses import TokenBatch
from tests.documented import blocks, files
from tests.unit.inference.fakes import FakeGateway, make_context, make_task, served_policy

REPOSITORY = Path(__file__).parents[2]
GUIDES = (
    "my-reward.md",
    "my-environment.md",
    "my-agent.md",
    "my-loss.md",
    "train-my-model.md",
    "two-gpus.md",
    "cluster.md",
)
RECIPES = [(guide, name) for guide in GUIDES for name in files(guide) if name.endswith(".yaml")]
CONSOLE = [(guide, block) for guide in GUIDES for block in blocks(guide, "console")]
WRITERS = ("mine/make_data.py", "mine/make_drawers.py")


@pytest.fixture
def follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Path]]:
    """Write the files of a guide, and of its first guide, and change to their directory."""

    def write(guide: str) -> Path:
        for name, text in {**files("train-my-model.md"), **files(guide)}.items():
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        for name in WRITERS:
            if (tmp_path / name).exists():
                runpy.run_path(str(tmp_path / name))
        return tmp_path

    (tmp_path / "recipes").symlink_to(REPOSITORY / "recipes")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    before = {name for name in sys.modules if name.split(".")[0] == "mine"}
    yield write
    for name in [name for name in sys.modules if name.split(".")[0] == "mine" and name not in before]:
        del sys.modules[name]


@pytest.mark.parametrize(("guide", "recipe"), RECIPES, ids=[name for _, name in RECIPES])
def test_the_recipe_of_a_guide_is_valid(follow: Callable[[str], Path], guide: str, recipe: str) -> None:
    follow(guide)
    told = CliRunner().invoke(app, ["check", recipe, "--profile", "tiny"])
    assert told.exception is None and " is ready to run: " in told.output
    assert load_recipe(Path(recipe), [], {}).name == yaml.safe_load(Path(recipe).read_text())["name"]


@pytest.mark.parametrize("recipe", [name for name in files("hub-environments.md") if name.endswith(".yaml")])
def test_the_recipe_of_an_environment_from_a_hub_is_valid(follow: Callable[[str], Path], recipe: str) -> None:
    """Without the environment itself, which is a package or a server elsewhere."""
    follow("hub-environments.md")
    assert load_recipe(Path(recipe), [], {}).data.evaluation


@pytest.mark.parametrize(("guide", "block"), CONSOLE, ids=[guide for guide, _ in CONSOLE])
def test_the_error_of_a_guide_is_what_the_command_says(follow: Callable[[str], Path], guide: str, block: str) -> None:
    here = follow(guide)
    command, _, output = block.partition("\n")
    program, *arguments = shlex.split(command.removeprefix("$ "))
    assert program == "rollmill"
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, RollmillError)
    assert f"error: {result.exception.message}" == output.rstrip("\n").replace("/home/me/rollmill", str(here))


@pytest.mark.parametrize(("text", "reward"), [(r"\boxed{42}", 1.0), (r"\boxed{41}", 0.0), (r"so \boxed{42}", 0.0)])
def test_the_reward_scores(follow: Callable[[str], Path], text: str, reward: float) -> None:
    follow("my-reward.md")
    assert load_object("mine.rewards:boxed")({"answer": "42"}, text) == reward


def test_the_environment_pays_for_the_coin_and_answers_what_is_no_action(follow: Callable[[str], Path]) -> None:
    follow("my-environment.md")
    episode = load_object("mine.environments:Drawers")(None)
    assert "5 drawers" in episode.reset({"drawers": 5, "coin": 3}, seed=1).text
    results: list[StepResult] = [episode.step(action) for action in ("look", "open 9", "open 3")]
    assert [(result.reward, result.done) for result in results] == [(0.0, False), (0.0, False), (1.0, True)]
    assert results[-1].metrics == {"opened": 3}


@pytest.mark.parametrize(
    ("texts", "reward", "attempts"),
    [
        ([r"\boxed{42}"], 1.0, 1),
        (["41", r"\boxed{42}"], 0.5, 2),
        (["41", "40", r"\boxed{42}"], 0.25, 3),
        (["41"], 0.0, 3),
    ],
)
async def test_the_workflow_plays(
    follow: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, texts: list[str], reward: float, attempts: int
) -> None:
    follow("my-agent.md")
    (Path("mine") / "grade.py").write_text(
        "def boxed(task, text):\n    return float(text == rf'\\boxed{{{task[\"answer\"]}}}')\n"
    )
    recipe = load_recipe(Path("mine/agent.yaml"), ["workflow.settings.reward=mine.grade:boxed"], {})
    policy = await served_policy(texts)
    outcome = await build_workflow(recipe.workflow).run(make_task(), make_context(policy, FakeGateway()))
    assert (outcome.reward, outcome.metrics["attempts"]) == (reward, attempts)


async def test_the_client_plays(follow: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the endpoint; `tests/integration/inference/test_external_agent.py` has the real one."""
    follow("my-agent.md")
    asked: list[dict[str, Any]] = []

    class Client:
        def __init__(self, base_url: str, api_key: str) -> None:
            self.chat = self.completions = self
            asked.append({"base_url": base_url, "api_key": api_key})

        async def __aenter__(self) -> Client:
            return self

        async def __aexit__(self, *_: object) -> None:
            await asyncio.sleep(0)

        async def create(self, **request: Any) -> Any:
            asked.append(request)
            said = type("Message", (), {"content": r"\boxed{42}"})
            return type("Answer", (), {"choices": [type("Choice", (), {"message": said})]})

    agent = load_object("mine.client:agent")
    monkeypatch.setattr(sys.modules["mine.client"], "AsyncOpenAI", Client)
    task = {"messages": [{"role": "user", "content": "6 times 7?"}], "answer": "42"}
    assert await agent(task, "http://here/v1", "secret") == 1.0
    assert asked == [
        {"base_url": "http://here/v1", "api_key": "secret"},
        {"model": "default", "messages": task["messages"]},
    ]


def test_the_loss_clips_negative_advantages_earlier(follow: Callable[[str], Path]) -> None:
    import torch

    follow("my-loss.md")
    tokens = TokenBatch(
        logprobs=torch.tensor([0.15, -0.15, -0.05], dtype=torch.float64),
        behaviour=torch.zeros(3, dtype=torch.float64),
        advantages=torch.tensor([1.0, -1.0, -1.0], dtype=torch.float64),
        mask=torch.ones(3, dtype=torch.bool),
        sequence_index=torch.zeros(3, dtype=torch.int64),
        num_sequences=1,
    )
    loss = load_object("mine.losses:clipped")(tokens, {"eps": 0.2, "eps_negative": 0.1})
    ratios = tokens.logprobs.exp()
    expected = torch.stack([-ratios[0], torch.tensor(0.9, dtype=torch.float64), ratios[2]])
    torch.testing.assert_close(loss.per_token, expected)
    assert loss.counts["clipped_tokens"] == 1
