"""Every wrong input of the table is told by ``rollmill check``, with the key and the remedy."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from services.cli.check import models as hub
from services.cli.check.recipe import check_recipe, describe
from services.common.config.loading import load_recipe
from services.common.errors import ConfigError
from tests.unit.cli.hub_server import answering
from tests.unit.cli.wrong_inputs import MIXTURES, WRONG, Wrong, write_good

ALL = [*WRONG, *MIXTURES]


@pytest.fixture(scope="module")
def hub_address() -> Iterator[str]:
    """Of a hub that knows no name, and is away for one of them."""
    with answering(lambda name: 503 if "away" in name else 404) as (url, _):
        yield url


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    write_good(folder)
    return folder


@pytest.fixture
def folder(good: Path, tmp_path: Path, hub_address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the good recipe; its modules are forgotten afterwards."""
    for name in ("HF_HUB_OFFLINE", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub_address)
    monkeypatch.setattr("services.common.importing._directories", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    # Without the environments that `make sglang-env` and `make vllm-env` put beside the sources.
    monkeypatch.setattr("services.inference.engine.served.process.ROOT", tmp_path)
    monkeypatch.delenv("ROLLMILL_SGLANG_PYTHON", raising=False)
    monkeypatch.delenv("ROLLMILL_VLLM_PYTHON", raising=False)
    hub._ask.cache_clear()
    hub._unreachable.clear()
    place = tmp_path / "mine"
    shutil.copytree(good, place)
    monkeypatch.chdir(tmp_path)
    yield place
    for name in [name for name, module in sys.modules.items() if str(place) in str(getattr(module, "__file__", ""))]:
        del sys.modules[name]
    hub._ask.cache_clear()
    hub._unreachable.clear()


def apply(folder: Path, wrong: Wrong) -> None:
    file = folder / "recipe.yaml"
    tree = yaml.safe_load(file.read_text())
    for path, value in wrong.settings.items():
        below = tree
        *above, last = path.split(".")
        for key in above:
            below = below.setdefault(key, {})
        below[last] = value
    text = yaml.safe_dump(tree, sort_keys=False)
    file.write_text(wrong.edit(text) if wrong.edit else text)
    for name, content in wrong.files.items():
        if content is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def checked(folder: Path, wrong: Wrong) -> str:
    """The output of ``rollmill check``: the error, or the description with its yellow lines."""
    try:
        recipe = load_recipe(folder, wrong.overrides, {})
        told = check_recipe(recipe)
    except ConfigError as error:
        return error.message
    output = io.StringIO()
    Console(file=output, width=10_000).print(describe(recipe, told))
    return output.getvalue()


def test_the_good_recipe_passes_and_shows_its_first_row(folder: Path) -> None:
    shown = checked(folder, Wrong("good", ()))
    assert "mine is ready to run: 100 training steps" in shown
    assert "first row as a prompt of 24 tokens" in shown and "What is 0 plus 0?" in shown
    assert "first row scored by my_rewards:exact: 0 for an empty answer, 1 for the row's own answer" in shown


def test_check_shows_a_row_of_each_source(folder: Path) -> None:
    (folder / "other.jsonl").write_text('{"problem": "Spell cat", "answer": "c a t"}\n')
    own = {"path": "./other.jsonl", "weight": 2, "workflow": {"settings": {"reward": "my_rewards:words"}}}
    apply(folder, Wrong("mixture", (), {"data.train": [{"path": "./rows.jsonl"}, own]}))
    shown = checked(folder, Wrong("mixture", ()))
    assert "first row of rows as a prompt of 24 tokens" in shown and "What is 0 plus 0?" in shown
    assert "first row of other as a prompt" in shown and "Spell cat" in shown
    assert "first row of rows scored by my_rewards:exact" in shown
    assert "first row of other scored by my_rewards:words: 0 for an empty answer, 3 for the row's own answer" in shown


@pytest.mark.parametrize(
    ("reward", "scored", "is_told"),
    [
        ("boxed", "0 for an empty answer, 0 for the row's own answer, 1 for the same in a box", False),
        ("never", "0 for an empty answer, 0 for the row's own answer, 0 for the same in a box", True),
        ("number", "0 for an empty answer, 0 for the row's own answer", True),  # raises for a box
    ],
)
def test_a_reward_that_a_right_answer_does_not_raise_is_told(
    reward: str, scored: str, is_told: bool, folder: Path
) -> None:
    apply(folder, Wrong("reward", (), {"workflow.settings.reward": f"my_rewards:{reward}"}))
    shown = checked(folder, Wrong("reward", ()))
    assert f"first row scored by my_rewards:{reward}: {scored}\n" in re.sub(" +\n", "\n", shown)
    assert ("no more than an empty one: call the function" in shown) is is_told


TOLD = "gives the row's own answer no more than an empty one"


@pytest.mark.parametrize(
    ("reward", "answer", "shown"),
    [
        ("boxed", "So 8 + 9.\n#### 17", r"\boxed{17}"),
        ("boxed", 12.0, r"\boxed{12}"),
        ("boxed", "12", None),
        ("boxed", "Paris", None),
        ("math", "12", None),
        ("math", "$12$", None),
    ],
)
def test_a_built_in_reward_that_the_rows_own_answer_does_not_raise_is_told(
    reward: str, answer: Any, shown: str | None, folder: Path
) -> None:
    (folder / "rows.jsonl").write_text(json.dumps({"problem": "Add 8 and 9.", "answer": answer}) + "\n")
    apply(folder, Wrong("reward", (), {"workflow.settings.reward": reward}))
    told = checked(folder, Wrong("reward", ()))
    assert ("is ready to run" in told, TOLD in told) == (True, shown is not None), told
    assert shown is None or repr(shown)[1:-1] in told


def test_later_rows_and_answers_of_several_words_are_told(folder: Path) -> None:
    apply(folder, Wrong("reward", (), {"workflow.settings.reward": "boxed"}))
    for answers, expected in ((("12", *["so #### 12"] * 9), TOLD), (("The answer is 12.",), "write the value alone")):
        rows = [json.dumps({"problem": "Add 8 and 9.", "answer": answer}) + "\n" for answer in answers]
        (folder / "rows.jsonl").write_text("".join(rows))
        assert expected in checked(folder, Wrong("reward", ()))


@pytest.mark.needs("isolating sandbox")
@pytest.mark.parametrize(("solution", "is_told"), [("print(input())", False), ("print(1)", True), (None, False)])
def test_a_solution_that_fails_its_own_tests_is_told(solution: str | None, is_told: bool, folder: Path) -> None:
    tests = {"kind": "stdin", "cases": [{"stdin": "5", "expected": "5"}]}
    (folder / "rows.jsonl").write_text(json.dumps({"problem": "Echo.", "tests": tests, "solution": solution}) + "\n")
    apply(folder, Wrong("reward", (), {"workflow.settings.reward": "code"}))
    told = checked(folder, Wrong("reward", ()))
    assert ("is ready to run" in told, TOLD in told) == (True, is_told), told


def test_tools_that_run_in_the_replica_need_no_gateway(folder: Path) -> None:
    settings = {"tools": ["own_tool:Look"], "reward": "own_tool:score"}
    tool = """
class Look:
    name, description, parameters = "look", "Looks.", {"type": "object", "properties": {}}
    async def call(self): return "nothing"
def score(task, completion): return float(completion.strip() == task["answer"])
"""
    own = Wrong(
        "own tool",
        (),
        {"workflow": {"name": "tool_use", "settings": settings}, "envgateway": None},
        {"own_tool.py": tool},
    )
    apply(folder, own)
    assert "which the environment gateway computes" not in checked(folder, own)
    apply(folder, Wrong("code", (), {"workflow": {"name": "tool_use", "settings": settings | {"format": "code"}}}, {}))
    assert "workflow.name is tool_use, which the environment gateway computes" in checked(folder, own)


@pytest.mark.parametrize("wrong", ALL, ids=lambda wrong: wrong.name)
def test_a_wrong_input_is_told_with_key_and_remedy(folder: Path, wrong: Wrong) -> None:
    apply(folder, wrong)
    shown = checked(folder, wrong)
    assert [part for part in wrong.told if part not in shown] == [], shown
