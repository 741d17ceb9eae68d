"""``--profile tiny``: its changes, the unchanged settings, and its sources of rows."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from services.cli.check.worlds import index_problems, world_problems
from services.cli.profiles import load_with_profile, rows_here, tiny, world_here
from services.common.config.data import DatasetConfig
from services.common.config.loading import load_recipe, validate
from services.common.errors import ConfigError, DatasetError
from services.common.tiny import programs, sums
from services.orchestrator.tasks.datasets import open_source
from services.orchestrator.tasks.rows import KNOWN

RECIPES = Path(__file__).resolve().parents[3] / "recipes"
MATH = RECIPES / "math-multi-agent/qwen3-8b-single-agent-m2po-delta-deepscaler-data"
PAIR = RECIPES / "code-multi-agent/qwen3-8b-codegen-verifier-m2po-full-2node"

# All that may differ; `*` stands for one name. What a recipe is about must not.
CHANGED = (
    "name  run.steps  run.resume  warm_start.*  rollout.group_size  "
    "rollout.timeout_s  policies.*.model.path  policies.*.model.context_length  policies.*.batch.size  "
    "policies.*.batch.minibatches  policies.*.batch.max_staleness  policies.*.batch.resample.keep  policies.*.trainer.port  "
    "policies.*.trainer.num_ranks  policies.*.trainer.device  policies.*.trainer.threads  policies.*.trainer.master_dtype  "
    "policies.*.trainer.compute_dtype  policies.*.trainer.token_budget  policies.*.trainer.checkpoint_every  policies.*.weights.port  "
    "policies.*.weights.full_every  policies.*.weights.publish_dtype  data.train.name  data.train.limit  data.train.generator  "
    "data.train.id_field  data.train.max_prompt_tokens  data.evaluation.*.samples_per_task  sampling.min_new_tokens  evaluation.samplings.*.min_new_tokens  policies.*.trainer.offload  envgateway.math.num_workers  data.evaluation.*.max_prompt_tokens  data.evaluation.*.name  data.evaluation.*.limit  data.evaluation.*.generator  "
    "data.evaluation.*.id_field  sampling.max_new_tokens  evaluation.every  evaluation.samples_per_task  "
    "evaluation.samplings.*.max_new_tokens  orchestrator.port  inference.*.port  inference.*.engine  "
    "inference.*.device  inference.*.num_slots  envgateway.port  envgateway.sandbox.num_slots  envgateway.alfworld.engine.num_workers  "
    "envgateway.http.port  envgateway.queue.redis_uri  policies.*.trainer.gpus  policies.*.trainer.rendezvous_port  "
    "inference.*.node  inference.*.gpus  inference.*.engines  inference.*.dtype  "
)


def tree_of(recipe: Path, *settings: str) -> dict[str, Any]:
    return load_recipe(recipe, settings, {}).model_dump(mode="json")


def rows_or_its_own(dataset: Mapping[str, Any]) -> Mapping[str, Any]:
    """Tasks of worlds are not found without their world."""
    try:
        return rows_here(dataset)
    except DatasetError:
        return dataset


def no_world(environment: str, tree: Mapping[str, Any]) -> None:
    """The recipe's own environment and tasks are taken."""


def differences(before: Any, after: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before.keys() | after.keys():
            yield from differences(before.get(key), after.get(key), (*path, key))
    elif before != after:
        yield path


def allowed(path: tuple[str, ...]) -> bool:
    return any(
        len(pattern) <= len(path) and all(want in ("*", part) for want, part in zip(pattern, path, strict=False))
        for pattern in (tuple(line.split(".")) for line in CHANGED.split())
    )


@pytest.fixture(autouse=True)
def no_rows_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROLLMILL_DATA_ROOT", raising=False)


def test_every_recipe_becomes_small_enough_for_two_cores_and_keeps_what_it_is_about() -> None:
    found = sorted(RECIPES.rglob("recipe.yaml"))
    assert len(found) > 10
    for path in found:
        before = tree_of(path)
        untouched = copy.deepcopy(before)
        recipe = validate(tiny(before, rows_or_its_own, no_world), source=str(path))
        assert before == untouched, "the tree that was given is left as it is"
        changed = list(differences(before, recipe.model_dump(mode="json")))
        assert ("run", "steps") in changed
        assert not [".".join(place) for place in changed if not allowed(place)], path
        if (gateway := recipe.envgateway) is not None:
            pools = (gateway.alfworld.engine, gateway.textworld.engine, gateway.math)
            assert max(gateway.sandbox.num_slots, *(pool.num_workers for pool in pools)) <= 2, "processes for two cores"
        assert {port for _, port in recipe.ports()} == {0}
        assert {service.engine for service in recipe.inference.values()} == {"forced"}
        assert recipe.inference.keys() == before["inference"].keys(), "as many services as the recipe has"
        for policy in recipe.policies.values():
            trainer = policy.trainer
            assert (trainer.num_ranks, trainer.device, trainer.compute_dtype) == (1, "cpu", "float32")
            full_every = policy.weights.full_every
            assert policy.weights.transfer != "delta" or 1 < full_every < recipe.run.steps, (
                "fulls and deltas are both sent"
            )
        assert recipe.evaluation.every < recipe.run.steps == 3, "an evaluation happens while it trains"


def test_models_are_built_by_their_architecture() -> None:
    agents = tiny(tree_of(RECIPES / "alfworld/qwen2.5-7b-instruct-m2po-full"), rows_or_its_own, no_world)
    assert agents["warm_start"]["model0"]["builder_settings"] == {"kind": "qwen2"}
    pair = tiny(tree_of(PAIR), rows_here, no_world)
    assert pair["warm_start"].keys() == {"model0", "model1"}
    assert pair["warm_start"]["model1"]["builder_settings"] == {"kind": "qwen3"}
    assert pair["policies"]["model0"]["model"]["path"] is None


def test_rows_of_this_machine_are_read_under_their_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLMILL_DATA_ROOT", str(tmp_path))
    for name in ("aime24", "math-train"):
        path = tmp_path / KNOWN[name].local
        path.parent.mkdir()
        path.write_text('{"problem": "1+1?", "answer": "2"}\n')
    data = tiny(tree_of(MATH), rows_here, no_world)["data"]
    assert data["evaluation"]["aime24"]["name"] == "aime24"
    assert data["train"]["name"] == "math-train", "of the same form, in place of one that is not here"
    assert (data["train"]["limit"], data["evaluation"]["aime24"]["limit"]) == (64, 2)


@pytest.mark.parametrize(
    ("name", "columns"),
    [("dapo-math-17k", {"id", "problem", "answer"}), ("livecodebench-v5", {"id", "problem", "tests", "solution"})],
)
def test_where_no_rows_are_made_ones_are_played(name: str, columns: set[str]) -> None:
    train = {**tree_of(MATH)["data"]["train"], "name": name}
    source = open_source(DatasetConfig.model_validate({**rows_here(train), "limit": 5}), seed=1)
    assert len(source) == 5
    assert source[0].data.keys() == columns


def test_made_rows_are_right() -> None:
    row = next(sums(3))
    left, right = re.findall(r"\d+", row["problem"])
    assert int(left) + int(right) == int(row["answer"])
    for _, made in zip(range(5), programs(3), strict=False):
        for case in made["tests"]["cases"]:
            assert printed_by(made["solution"], case["stdin"]) == case["expected"]


def printed_by(program: str, stdin: str) -> str:
    printed: list[str] = []
    exec(program, {"input": lambda: stdin, "print": lambda value: printed.append(f"{value}\n")})
    return "".join(printed)


def agents(environment: str, runs: Path, *settings: str) -> dict[str, Any]:
    """The tree of a recipe that plays episodes."""
    return tree_of(RECIPES / environment / "qwen2.5-7b-instruct-m2po-full", f"run.dir={runs}", *settings)


def test_a_shop_is_made_where_there_is_none(tmp_path: Path) -> None:
    recipe = validate(tiny(agents("webshop", tmp_path), rows_here, world_here), source="t")
    assert recipe.envgateway is not None
    assert recipe.envgateway.webshop.data == tmp_path / "worlds" / "webshop-catalogue"
    assert (tmp_path / "worlds" / "webshop-catalogue" / "items_human_ins.json").is_file()
    for dataset in (recipe.data.train, *recipe.data.evaluation.values()):
        assert open_source(dataset, seed=1)[1].data == {"id": "1", "index": 1, "messages": []}


def test_games_are_played_with_the_commands_that_win_them(tmp_path: Path) -> None:
    for name, commands in (("long", ["go", "take", "go", "put"]), ("short", ["go", "put"]), ("unknown", [])):
        game = tmp_path / "own" / "json_2.1.1" / name / "game.tw-pddl"
        game.parent.mkdir(parents=True)
        game.write_text(json.dumps({"walkthrough": commands}))
    tree = agents("alfworld", tmp_path, f"envgateway.alfworld.data={tmp_path / 'own'}")
    recipe = validate(tiny(tree, rows_here, world_here), source="t")
    source = open_source(recipe.data.train, seed=1)
    assert [source[row].data["expert"] for row in range(len(source))] == [["go", "put"], ["go", "take", "go", "put"]]
    assert source[0].data["game"] == "json_2.1.1/short/game.tw-pddl"


@pytest.mark.needs("alfworld")
def test_houses_are_made_where_there_are_no_games(tmp_path: Path) -> None:
    for _ in range(2):  # the second time they are there
        made = tiny(agents("alfworld", tmp_path), rows_here, world_here)
    folder = Path(made["envgateway"]["alfworld"]["data"])
    assert len(list(folder.rglob("game.tw-pddl"))) == 24
    assert [path.name for path in (tmp_path / "worlds").iterdir()] == ["alfworld-houses"]


def test_settings_of_the_command_line_count_after_the_profile() -> None:
    sets = ["run.steps=5", "data.train.limit=9", "inference.a.forced.right_share=0.9", "data.train.name=gsm8k"]
    recipe = load_with_profile(MATH, sets, "tiny")
    assert (recipe.run.steps, recipe.data.train.limit, recipe.inference["a"].forced.right_share) == (5, 9, 0.9)
    assert load_with_profile(MATH, [], None) == load_recipe(MATH)
    with pytest.raises(ConfigError, match="write one of tiny"):
        load_with_profile(MATH, [], "small")


def test_a_recipe_that_cannot_run_is_told_before_it_is_made_small(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("extends: quickstart\ninference: {a: {policies: [nobody]}}\n")
    with pytest.raises(ConfigError, match="nobody"):
        load_with_profile(tmp_path, [], "tiny")


def test_the_worlds_of_agents_are_here_and_have_their_tasks(tmp_path: Path) -> None:
    for name in ("webshop", *(["alfworld"] if find_spec("alfworld") else [])):
        path = RECIPES / name / "qwen2.5-7b-instruct-m2po-full"
        recipe = load_with_profile(path, [f"run.dir={tmp_path}"], "tiny")
        assert index_problems(recipe) == world_problems(recipe) == []
