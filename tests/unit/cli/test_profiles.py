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
import yaml

from services.cli.check.worlds import index_problems, world_problems
from services.cli.profiles import load_with_profile, rows_here, world_here
from services.common.config.loading import load_recipe, validate
from services.common.config.profiles.tiny import tiny
from services.common.errors import ConfigError
from services.common.tiny import programs, sums
from services.orchestrator.tasks.datasets import open_source
from services.orchestrator.tasks.rows import KNOWN

POLICY: dict[str, Any] = {
    "model": {"path": "Qwen/Qwen3-8B", "context_length": 16384},
    "algorithm": {"name": "m2po", "kl_coefficient": 0.001, "batch_normalize_advantages": True},
    "optimizer": {"lr": 5e-6, "weight_decay": 0.01},
    "batch": {"size": 256, "minibatches": 4, "max_staleness": 8},
    "trainer": {
        "num_ranks": 2,
        "gpus": [6, 7],
        "rendezvous_port": 29541,
        "compute_dtype": "bfloat16",
        "gradient_checkpointing": True,
        "checkpoint_every": 26,
    },
    "weights": {"transfer": "delta", "full_every": 10, "port": 19861},
}
OTHER: dict[str, Any] = {
    **POLICY,
    "trainer": {**POLICY["trainer"], "port": 50072, "gpus": [4, 5], "rendezvous_port": 29542},
    "weights": {**POLICY["weights"], "port": 19862},
}
BASE: dict[str, Any] = {
    "name": "big",
    "run": {"steps": 1200, "seed": 7},
    "policies": {"model0": POLICY},
    "workflow": {"name": "single_turn", "settings": {"reward": "math"}},
    "data": {"train": {"name": "dapo-math-17k"}, "evaluation": {"aime": {"name": "aime24"}, "minerva": {"name": "minerva-math"}}},
    "sampling": {"max_new_tokens": 4096, "top_p": 0.95, "top_k": 50},
    "evaluation": {"every": 25, "samples_per_task": 4, "at_start": False, "samplings": {"s": {"temperature": 0.6}}},
    "inference": {"a": {"engine": "sglang", "num_slots": 512, "port": 50061, "dtype": "bfloat16"}, "b": {"engine": "sglang", "node": 1, "port": 50062}},
}  # fmt: skip
RECIPES: dict[str, dict[str, Any]] = {
    "math": BASE,
    "pair": {**BASE, "policies": {"model0": POLICY, "model1": OTHER}, "workflow": {"name": "actor_verifier"}},
    "agents": {
        **BASE,
        "workflow": {"name": "agent_env", "settings": {"environment": "alfworld", "max_turns": 15}},
        "policies": {"model0": {**POLICY, "model": {"path": "Qwen/Qwen2.5-7B-Instruct", "context_length": 16384}}},
        "envgateway": {"alfworld": {"engine": {"num_workers": 48}}},
    },
    "tools": {
        **BASE,
        "rollout": {"group_size": 32},
        "workflow": {"name": "tool_math"},
        "policies": {"model0": {**POLICY, "batch": {**POLICY["batch"], "resample": {"keep": 16}}}},
        "envgateway": {"http": {"port": 8000}, "queue": {"redis_uri": "redis://127.0.0.1:6379"}},
    },
}

# All that may differ; `*` stands for one name. What a recipe is about must not.
CHANGED = (
    "name  run.steps  warm_start.*  rollout.group_size  "
    "rollout.timeout_s  policies.*.model.path  policies.*.model.context_length  policies.*.batch.size  "
    "policies.*.batch.minibatches  policies.*.batch.max_staleness  policies.*.batch.resample.keep  policies.*.trainer.port  "
    "policies.*.trainer.num_ranks  policies.*.trainer.device  policies.*.trainer.threads  policies.*.trainer.master_dtype  "
    "policies.*.trainer.compute_dtype  policies.*.trainer.token_budget  policies.*.trainer.checkpoint_every  policies.*.weights.port  "
    "policies.*.weights.full_every  policies.*.weights.publish_dtype  data.train.name  data.train.limit  data.train.generator  "
    "data.train.id_field  data.evaluation.*.name  data.evaluation.*.limit  data.evaluation.*.generator  "
    "data.evaluation.*.id_field  sampling.max_new_tokens  evaluation.every  evaluation.samples_per_task  "
    "evaluation.samplings.*.max_new_tokens  orchestrator.port  inference.*.port  inference.*.engine  "
    "inference.*.device  inference.*.num_slots  envgateway.port  envgateway.sandbox.num_slots  envgateway.alfworld.engine.num_workers  "
    "envgateway.http.port  envgateway.queue.redis_uri  policies.*.trainer.gpus  policies.*.trainer.rendezvous_port  "
    "inference.*.node  inference.*.gpus  inference.*.engines  inference.*.dtype  "
)


def tree_of(name: str) -> dict[str, Any]:
    return validate(RECIPES[name], source=name).model_dump(mode="json")


def no_world(environment: str, tree: Mapping[str, Any]) -> None:
    """The recipe's own environment and tasks are taken."""


def small(name: str) -> dict[str, Any]:
    return tiny(tree_of(name), rows_here, no_world)


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


@pytest.mark.parametrize("name", RECIPES)
def test_what_a_recipe_is_about_stays(name: str) -> None:
    before = tree_of(name)
    untouched = copy.deepcopy(before)
    after = tiny(before, rows_here, no_world)
    assert before == untouched, "the tree that was given is left as it is"
    found = list(differences(before, validate(after, source=name).model_dump(mode="json")))
    assert not [".".join(path) for path in found if not allowed(path)]
    assert ("run", "steps") in found


@pytest.mark.parametrize("name", RECIPES)
def test_it_runs_on_this_machine_alone(name: str) -> None:
    recipe = validate(small(name), source=name)
    if (gateway := recipe.envgateway) is not None:
        pools = (gateway.alfworld.engine, gateway.textworld.engine, gateway.math)
        assert max(gateway.sandbox.num_slots, *(pool.num_workers for pool in pools)) <= 2, "processes for two cores"
    assert {port for _, port in recipe.ports()} == {0}
    assert {service.engine for service in recipe.inference.values()} == {"forced"}
    assert set(recipe.inference) == {"a", "b"}, "as many services as the recipe has"
    for policy in recipe.policies.values():
        assert policy.trainer.num_ranks == 1
        assert (policy.trainer.device, policy.trainer.compute_dtype) == ("cpu", "float32")
        assert policy.weights.transfer == "delta"
        assert 1 < policy.weights.full_every < recipe.run.steps, "fulls and deltas are both sent"
    assert recipe.run.steps == 3
    assert recipe.evaluation.every < recipe.run.steps, "an evaluation happens while it trains"


def test_models_are_built_by_their_architecture() -> None:
    assert small("agents")["warm_start"]["model0"]["builder_settings"] == {"kind": "qwen2"}
    pair = small("pair")
    assert pair["warm_start"].keys() == {"model0", "model1"}
    assert pair["warm_start"]["model1"]["builder_settings"] == {"kind": "qwen3"}
    assert pair["policies"]["model0"]["model"]["path"] is None


def test_rows_of_this_machine_are_read_under_their_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLMILL_DATA_ROOT", str(tmp_path))
    for name in ("aime24", "math-train"):
        path = tmp_path / KNOWN[name].local
        path.parent.mkdir()
        path.write_text('{"problem": "1+1?", "answer": "2"}\n')
    data = small("math")["data"]
    assert data["evaluation"]["aime"]["name"] == "aime24"
    assert data["train"]["name"] == "math-train", "of the same form, in place of one that is not here"
    assert (data["train"]["limit"], data["evaluation"]["aime"]["limit"]) == (64, 2)


@pytest.mark.parametrize(
    ("name", "columns"),
    [("dapo-math-17k", {"id", "problem", "answer"}), ("livecodebench-v5", {"id", "problem", "tests", "solution"})],
)
def test_where_no_rows_are_made_ones_are_played(name: str, columns: set[str]) -> None:
    train = {**tree_of("math")["data"]["train"], "name": name}
    recipe = validate({**BASE, "data": {"train": {**rows_here(train), "limit": 5}}} | {"evaluation": {"at_start": False, "at_end": False}}, source="t")  # fmt: skip
    source = open_source(recipe.data.train, seed=1)
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


def agents(environment: str, runs: Path, **gateway: Any) -> dict[str, Any]:
    """The tree of a recipe that plays episodes."""
    workflow = {"name": "agent_env", "settings": {"environment": environment}}
    tree = {**RECIPES["agents"], "run": {"steps": 1200, "dir": str(runs)}, "workflow": workflow, "envgateway": gateway}
    return validate(tree, source="agents").model_dump(mode="json")


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
    tree = agents("alfworld", tmp_path, alfworld={"data": str(tmp_path / "own")})
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


def written(tmp_path: Path, tree: Mapping[str, Any]) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(dict(tree)))
    return path


def test_settings_of_the_command_line_count_after_the_profile(tmp_path: Path) -> None:
    path = written(tmp_path, BASE)
    sets = ["run.steps=5", "data.train.limit=9", "inference.a.forced.right_share=0.9", "data.train.name=gsm8k"]
    recipe = load_with_profile(path, sets, "tiny")
    assert recipe.run.steps == 5
    assert recipe.data.train.limit == 9
    assert recipe.inference["a"].forced.right_share == 0.9
    assert load_with_profile(path, [], None) == load_recipe(path)


def test_a_recipe_that_cannot_run_is_told_before_it_is_made_small(tmp_path: Path) -> None:
    path = written(tmp_path, {**BASE, "inference": {"a": {"policies": ["nobody"]}}})
    with pytest.raises(ConfigError, match="nobody"):
        load_with_profile(path, [], "tiny")


def test_profiles_that_do_not_exist_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="write one of tiny"):
        load_with_profile(written(tmp_path, BASE), [], "small")


def test_every_recipe_can_be_made_tiny(repository: Path, tmp_path: Path) -> None:
    found = sorted((repository / "recipes").rglob("recipe.yaml"))
    assert found
    for path in found:
        if path.parts[-3] == "alfworld" and not find_spec("alfworld"):
            continue
        recipe = load_with_profile(path, [f"run.dir={tmp_path}"], "tiny")
        assert {port for _, port in recipe.ports()} == {0}, path
        assert recipe.run.steps == 3
        assert index_problems(recipe) == world_problems(recipe) == [], "its world is here and has its tasks"
