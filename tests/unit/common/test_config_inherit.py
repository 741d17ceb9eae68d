"""``extends``: recipes by name, the folders of modules, and sections that begin anew in a child."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.common.config.loading import load_recipe
from services.common.errors import ConfigError

PARENT = """
name: parent
policies: {model0: {model: {path: some/model}}}
workflow: {name: tool_use, settings: {max_turns: 3, reward: math}}
data:
  train: {generator: "a.b:c", settings: {split: train}, id_field: id, limit: 5}
  evaluation: {held_out: {path: held_out.jsonl}}
evaluation: {at_start: false, at_end: false}
"""


def write(folder: Path, text: str, name: str = "recipe.yaml") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(text)
    return path


def test_extends_by_name_finds_the_recipes_that_come_with_rollmill_from_any_folder(tmp_path: Path) -> None:
    own = PARENT.replace("name: parent", "extends: base\nname: mine")
    recipe = load_recipe(write(tmp_path, own), (), {})
    assert recipe.orchestrator.port == 50050
    assert load_recipe(write(tmp_path, "extends: quickstart\nname: mine\n"), (), {}).workflow.name == "tool_use"


def test_a_file_beside_the_recipe_goes_before_a_name(tmp_path: Path) -> None:
    write(tmp_path / "base", PARENT)
    assert load_recipe(write(tmp_path, "extends: base\nname: mine\n"), (), {}).data.train.generator == "a.b:c"


@pytest.mark.parametrize(
    ("extends", "told"),
    [
        ("basis", ("'basis'", "base", "quickstart")),
        ("../nowhere.yaml", ("nowhere.yaml", "does not exist", "base")),
        ("[base]", ("one path or name", "['base']")),
        ("3", ("one path or name", "3")),
    ],
)
def test_a_name_that_is_none_is_told_with_those_that_there_are(
    tmp_path: Path, extends: str, told: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(write(tmp_path, f"extends: {extends}\nname: mine\n"), (), {})
    for part in told:
        assert part in caught.value.message


def test_a_name_without_the_ending_of_the_file_beside_the_recipe_is_told_with_the_ending(tmp_path: Path) -> None:
    write(tmp_path, PARENT).rename(tmp_path / "agent.v2.yaml")
    with pytest.raises(ConfigError, match=r"write agent\.v2\.yaml"):
        load_recipe(write(tmp_path, "extends: agent.v2\nname: mine\n"), (), {})


def test_the_folders_of_a_recipe_and_of_those_it_extends_hold_its_modules(tmp_path: Path) -> None:
    write(tmp_path / "parent", PARENT)
    write(tmp_path / "parent", "", "rewards_of_parent.py")
    child = write(tmp_path / "child", "extends: ../parent/recipe.yaml\nname: mine\n")
    write(tmp_path / "child", "", "rewards_of_child.py")
    assert load_recipe(child, (), {}).modules == [str(tmp_path / "child"), str(tmp_path / "parent")]


def test_another_workflow_begins_without_the_settings_of_the_parents(tmp_path: Path) -> None:
    write(tmp_path, PARENT, "parent.yaml")
    child = "extends: parent.yaml\nname: mine\nworkflow: {name: single_turn, settings: {reward: boxed}}\n"
    assert load_recipe(write(tmp_path, child), (), {}).workflow.settings == {"reward": "boxed"}
    same = "extends: parent.yaml\nname: mine\nworkflow: {name: tool_use, settings: {reward: boxed}}\n"
    assert load_recipe(write(tmp_path, same), (), {}).workflow.settings == {"max_turns": 3, "reward": "boxed"}


def test_set_of_another_workflow_does_the_same(tmp_path: Path) -> None:
    overrides = ["workflow.name=single_turn", "workflow.settings.reward=boxed"]
    assert load_recipe(write(tmp_path, PARENT), overrides, {}).workflow.settings == {"reward": "boxed"}


def test_another_source_of_data_replaces_the_parents_and_keeps_what_is_not_of_it(tmp_path: Path) -> None:
    write(tmp_path, PARENT, "parent.yaml")
    child = "extends: parent.yaml\nname: mine\ndata: {train: {path: mine.jsonl}}\n"
    train = load_recipe(write(tmp_path, child), (), {}).data.train
    assert (train.path, train.generator, train.settings, train.id_field, train.limit) == (
        "mine.jsonl",
        None,
        {},
        None,
        5,
    )
    by_set = load_recipe(write(tmp_path, PARENT), ["data.evaluation.held_out.name=math500"], {}).data
    assert by_set.evaluation["held_out"].path is None and by_set.train.generator == "a.b:c"


@pytest.mark.parametrize(("context", "tokens"), [(4096, 1024), (2048, 1024), (1024, 512), (128, 64)])
def test_the_default_budget_of_a_turn_leaves_room_for_a_prompt(tmp_path: Path, context: int, tokens: int) -> None:
    recipe = load_recipe(write(tmp_path, PARENT), [f"policies.model0.model.context_length={context}"], {})
    assert recipe.sampling.max_new_tokens == tokens
    assert recipe.evaluation.samplings["greedy"].max_new_tokens == tokens


@pytest.mark.parametrize("context", [128, 4096])
def test_an_evaluation_that_names_no_budget_has_that_of_training(tmp_path: Path, context: int) -> None:
    def budgets(*overrides: str) -> list[int]:
        given = [f"policies.model0.model.context_length={context}", "sampling.max_new_tokens=20", *overrides]
        return [s.max_new_tokens for s in load_recipe(write(tmp_path, PARENT), given, {}).evaluation.samplings.values()]

    assert budgets() == [20]
    assert budgets("evaluation.samplings={a: {}, b: {temperature: 1.0}}") == [20, 20]
    assert budgets("evaluation.samplings.greedy.max_new_tokens=30") == [30]


@pytest.mark.parametrize(
    ("override", "place"),
    [
        ("batch_size=8", "policies.<name>.batch.size"),
        ("policies.model0.batch.batch_size=8", "policies.<name>.batch.size"),
        ("learning_rate=1e-6", "policies.<name>.optimizer.lr"),
        ("policies.model0.lr=1e-6", "policies.<name>.optimizer.lr"),
        ("num_generations=8", "rollout.group_size"),
        ("steps=3", "run.steps"),
        ("max_tokens=5", "sampling.max_new_tokens"),
        ("reward=math", "workflow.settings.reward"),
    ],
)
def test_a_setting_in_the_wrong_section_is_told_with_its_place(tmp_path: Path, override: str, place: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(write(tmp_path, PARENT), [override], {})
    assert place in caught.value.message
