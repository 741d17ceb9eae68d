"""The production recipes: valid as a whole, every setting pinned, and variants that differ in one thing.

test_reference.py compares them with their references.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from services.cli.check import recipe as check
from services.cli.check.memory import GIB, estimates, misfits
from services.cli.check.recipe import check_launch
from services.common.config.loading import load_recipe
from services.common.errors import ConfigError
from tests.unit.recipes.golden import (
    DEFAULTS,
    FAMILIES,
    GOLDEN,
    REPOSITORY,
    defaults_of,
    golden_file,
    load,
    read,
    recipes,
    resolved,
    same,
    schema_defaults,
)


@pytest.mark.parametrize("name", recipes())
def test_every_resolved_setting_is_the_golden_one_or_the_default(name: str) -> None:
    recipe = load(name)
    golden, settings, defaults = read(golden_file(name)), resolved(recipe), defaults_of(recipe)
    assert [path for path in golden if not same(settings, path, golden[path])] == []
    unnamed = [path for path in settings if path not in golden and not same(defaults, path, settings[path])]
    assert unnamed == [], "run `python -m tests.unit.recipes.golden` and read the diff against the reference"


def test_no_default_changes_unseen() -> None:
    now = {path: value for name in recipes() for path, value in schema_defaults(load(name)).items()}
    assert [path for path, value in read(DEFAULTS).items() if not same(now, path, value)] == []


def test_there_is_no_golden_file_without_a_recipe() -> None:
    assert {file.name for file in GOLDEN.glob("*.json")} == {DEFAULTS.name, *(golden_file(n).name for n in recipes())}


@pytest.fixture
def livecodebench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data root with only the files that are fetched by hand."""
    file = tmp_path / "AReaL-boba-2-RL-Code" / "code_benchmark" / "lcb_v5" / "test.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"question": "Double it.", "input_output": {"inputs": ["1"], "outputs": ["2"]}}) + "\n")
    monkeypatch.setenv("ROLLMILL_DATA_ROOT", str(tmp_path))
    return file


@pytest.mark.parametrize("name", recipes())
def test_check_passes(name: str, livecodebench: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "ports_in_use", lambda recipe: [])  # of whatever runs on this machine
    recipe = load(name)
    check.check_recipe(recipe)
    check.describe(recipe)


@pytest.mark.parametrize("name", ["code/qwen3-8b-m2po-delta"])
def test_without_livecodebench_nothing_starts(name: str, livecodebench: Path, tmp_path: Path) -> None:
    livecodebench.unlink()
    console = Console(width=1000, record=True)
    console.print(check.describe(load(name)))
    with pytest.raises(ConfigError) as caught:
        check_launch(load(name))
    for text in (caught.value.message, console.export_text()):
        for told in (
            "data.evaluation.livecodebench_v5",
            str(livecodebench),
            "hf download inclusionAI/AReaL-boba-2-RL-Code --repo-type dataset --local-dir "
            f"{tmp_path}/AReaL-boba-2-RL-Code",
        ):
            assert told in text


@pytest.mark.parametrize("name", recipes())
def test_it_fits_into_80_gib_with_float32_masters_and_moments_on_the_host_for_two_trainers(name: str) -> None:
    recipe = load(name)
    assert misfits(recipe) == []
    assert all(estimate.total < 75 * GIB for estimate in estimates(recipe))
    for section in recipe.policies.values():
        assert section.trainer.master_dtype == "float32"
        assert section.trainer.offload == (["optimizer"] if section.trainer.num_ranks == 2 else [])


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("alfworld/qwen2.5-7b-instruct-m2po-full", "alfworld"),
        ("webshop/qwen2.5-7b-instruct-m2po-full", "envgateway.webshop.data"),
    ],
)
def test_without_its_world_nothing_starts_unless_a_server_plays_it(
    name: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.cli.check.recipe.gpus_here", lambda: [80.0] * 8)
    monkeypatch.setattr("services.cli.check.recipe._error_of", lambda python, program: "")  # torch sees them
    monkeypatch.setattr("services.cli.check.recipe.hub_problems", lambda recipe: [])
    monkeypatch.setattr("services.cli.check.memory.host_memory_bytes", lambda: 1e12)
    monkeypatch.setattr("services.cli.check.memory.shared_memory_here", lambda: 1e12)
    with pytest.raises(ConfigError, match=told):
        check_launch(load(name).model_copy(update={"inference": {}}))
    world = name.partition("/")[0]
    external = load_recipe(
        REPOSITORY / "recipes" / name, [f"envgateway.agentbench.{world}.url=http://127.0.0.1:1/api"], {}
    )
    check_launch(external.model_copy(update={"inference": {}}))


PAGES = sorted([*(REPOSITORY / "recipes").rglob("README.md"), REPOSITORY / "deploy" / "README.md"])


@pytest.mark.parametrize("name", recipes())
def test_each_recipe_is_in_the_readme_of_its_family(name: str) -> None:
    family, _, recipe = name.partition("/")
    assert f"`{recipe}`" in (REPOSITORY / "recipes" / family / "README.md").read_text()


def test_commands_in_the_documents_name_recipes_that_exist() -> None:
    families = "|".join(FAMILIES)
    for page in PAGES:
        for path in re.findall(rf"recipes/(?:{families})/[\w.-]+", page.read_text()):
            assert (REPOSITORY / path).exists(), f"{page}: {path}"
