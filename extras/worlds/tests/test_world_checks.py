"""Lists of games and goals that do not fit the datasets of a recipe, and worlds that are not on this machine."""

from __future__ import annotations

import importlib.util
import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from services.cli.check.recipe import check_launch, check_recipe
from services.cli.check.worlds import index_problems, world_problems
from services.cli.run.launch import start
from services.common.config.envgateway import EnvGatewayConfig
from services.common.config.loading import load_recipe
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError
from services.common.installing import install
from services.envgateway.envs.episodes import make_worlds

RECIPES = Path(__file__).parents[3] / "recipes"
HERE = ["inference.a.engine=torch", "inference.a.gpus=[]", "policies.model0.trainer.gpus=[]", "inference.a.device=cpu"]
HERE += ["policies.model0.trainer.num_ranks=1", "policies.model0.trainer.device=cpu"]


def recipe_of(family: str, *settings: str) -> Recipe:
    return load_recipe(RECIPES / family / "qwen2.5-7b-instruct-m2po-full", [*HERE, *settings], {})


def names_of(count: int) -> list[str]:
    return [f"json_2.1.1/train/pick-{place}/trial/game.tw-pddl" for place in range(count)]


def tree(folder: Path, names: list[str]) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text("{}")
    return folder


def listed(path: Path, count: int) -> Path:
    path.write_text(json.dumps({"pick": names_of(count)}))
    return path


def test_a_list_of_games_that_is_too_short_is_refused_with_both_numbers(tmp_path: Path) -> None:
    games = listed(tmp_path / "short.json", 18)
    recipe = recipe_of("alfworld", f"envgateway.alfworld.games={games}")
    holds = f"envgateway.alfworld.games ({games}) holds 18 games; "
    for refuse in (check_recipe, check_launch):
        with pytest.raises(ConfigError) as caught:
            refuse(recipe)
        assert f"{holds}data.train.name alfworld-train asks for index 4648" in caught.value.message
        assert f"{holds}data.evaluation.alfworld.name alfworld-valid asks for index 4698" in caught.value.message


def test_the_gateway_alone_is_not_started_with_such_a_list(tmp_path: Path) -> None:
    games = listed(tmp_path / "short.json", 18)
    recipe = recipe_of("alfworld", f"envgateway.alfworld.games={games}", f"run.dir={tmp_path}")
    with pytest.raises(ConfigError, match=r"holds 18 games; .* index 4648"):
        start(recipe, "envgateway", run_dir=tmp_path / "run", console=Console(file=StringIO()))
    assert not (tmp_path / "run").exists()


def test_a_folder_of_games_that_is_too_small_is_refused_with_both_numbers(tmp_path: Path) -> None:
    data = tree(tmp_path / "data", names_of(3))
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"index": 2}\n{"index": 3}\n{"game": "x", "index": 9}\n')
    mine = [f"data.{where}.name=null" for where in ("train", "evaluation.alfworld")]
    mine += [f"data.{where}.path={rows}" for where in ("train", "evaluation.alfworld")]
    recipe = recipe_of("alfworld", f"envgateway.alfworld.data={data}", "envgateway.alfworld.games=null", *mine)
    assert index_problems(recipe) == [
        f"envgateway.alfworld.data ({data}) holds 3 games; data.{where}.path {rows} asks for index 3"
        for where in ("train", "evaluation.alfworld")
    ]
    rows.write_text('{"index": 2}\n')
    assert index_problems(recipe) == []
    rows.write_text('{"index": -1}\n')
    assert "asks for index -1" in index_problems(recipe)[0]


def test_the_references_indices_are_refused_without_the_list_that_they_count_in(tmp_path: Path) -> None:
    data = tree(tmp_path / "data", names_of(3))
    recipe = recipe_of("alfworld", f"envgateway.alfworld.data={data}", "envgateway.alfworld.games=null")
    problems = index_problems(recipe)
    assert sum("name the list with envgateway.alfworld.games" in problem for problem in problems) == 2
    assert any("holds 3 games; data.train.name alfworld-train asks for index 4648" in problem for problem in problems)


def test_games_of_the_list_that_are_not_in_the_folder_are_counted_and_one_is_named(tmp_path: Path) -> None:
    names, data = names_of(4699), tree(tmp_path / "data", names_of(4649))
    games = listed(tmp_path / "list.json", 4699)
    recipe = recipe_of("alfworld", f"envgateway.alfworld.data={data}", f"envgateway.alfworld.games={games}")
    (problem,) = index_problems(recipe)
    assert problem.startswith("50 of the 50 games that data.evaluation.alfworld.name alfworld-valid asks for")
    assert str(data) in problem and problem.endswith(names[4649])


def test_goals_that_are_too_few_are_refused_with_both_numbers(tmp_path: Path) -> None:
    goal = {
        "asin": "A", "name": "mug", "query": "mug", "product_category": "a", "instruction_text": "buy a mug",
        "attributes": ["blue"], "goal_options": [], "price_upper": 10.0,
    }  # fmt: skip
    goals = tmp_path / "goals.json"
    goals.write_text(json.dumps({"goals": [goal] * 200, "prices": {"A": 5.0}}))
    recipe = recipe_of("webshop", f"envgateway.webshop.goals={goals}")
    holds = f"envgateway.webshop.goals ({goals}) holds 200 goals; "
    assert index_problems(recipe) == [f"{holds}data.train.name webshop-train asks for index 12086"]
    with pytest.raises(ConfigError, match="holds 200 goals"):
        check_recipe(recipe)


@pytest.mark.parametrize("family", ["alfworld", "webshop"])
def test_what_a_server_or_the_recipes_own_class_plays_is_not_looked_for_here(family: str, tmp_path: Path) -> None:
    short = tmp_path / "short.json"
    short.write_text(json.dumps(["a"] if family == "alfworld" else {"goals": [], "prices": {}}))
    key = "games" if family == "alfworld" else "goals"
    for other in (
        f"envgateway.agentbench.{family}.url=http://127.0.0.1:1/api",
        f"envgateway.environments.{family}=a:B",
    ):
        recipe = recipe_of(family, f"envgateway.{family}.{key}={short}", other)
        assert index_problems(recipe) == world_problems(recipe) == []


@pytest.mark.needs("alfworld", "textworld")
def test_a_world_that_cannot_be_offered_is_a_reason_that_names_the_setting(tmp_path: Path) -> None:
    assert "envgateway.alfworld.data" in str(make_worlds(EnvGatewayConfig())["alfworld"])
    missing = str(tmp_path / "none")
    listed = EnvGatewayConfig.model_validate({"alfworld": {"data": missing, "games": missing}})
    for setting in ("envgateway.alfworld.data: there is no folder", "envgateway.alfworld.games: there is no file"):
        assert f"{setting} {missing}" in str(make_worlds(listed)["alfworld"])
    config = EnvGatewayConfig.model_validate({"alfworld": {"data": missing}, "textworld": {"games": missing}})
    worlds = make_worlds(config)
    for name, setting in (("alfworld", "envgateway.alfworld.data"), ("textworld", "envgateway.textworld.games")):
        assert worlds[name] == f"{setting}: there is no folder {missing}"


def test_an_engine_that_is_not_installed_is_a_reason_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    worlds = make_worlds(EnvGatewayConfig())
    assert install("alfworld") in str(worlds["alfworld"])
    assert install("textworld") in str(worlds["textworld"])
