"""Recipes: extends, overrides, variables, and errors that name the path and the correction."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from services.common.config.loading import load_recipe, load_resolved, save_resolved
from services.common.errors import ConfigError

MINIMAL = """
name: tiny
policies:
  model0:
    model: {path: some/model}
data:
  train: {path: tasks.jsonl}
evaluation: {at_start: false, at_end: false}
"""


def write(directory: Path, text: str, name: str = "recipe.yaml") -> Path:
    path = directory / name
    path.write_text(dedent(text))
    return path


def test_paths_in_a_home_and_relative_ones_of_overrides_are_absolute_for_all_readers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "my home"))
    monkeypatch.chdir(tmp_path)
    text = MINIMAL.replace("tasks.jsonl", "~/tasks.jsonl").replace("some/model", "~no-such-user/model")
    recipe = load_recipe(write(tmp_path, text), ["run.dir=~/runs", "policies.model0.model.path=../~/m ü"])
    assert recipe.data.train.path == f"{tmp_path}/my home/tasks.jsonl"  # type: ignore[union-attr]
    assert recipe.run.dir == f"{tmp_path}/my home/runs"
    assert recipe.policies["model0"].model.path == f"{tmp_path.parent}/~/m ü"
    unknown = load_recipe(write(tmp_path, text)).policies["model0"].model.path
    assert unknown == "~no-such-user/model"  # and `check` says that there is none
    assert load_recipe(write(tmp_path, text), ["description='~'"]).description == "~"  # a text, and no path
    save_resolved(recipe, tmp_path / "run")
    assert load_resolved(tmp_path / "run") == recipe


def test_paths_with_a_leading_dot_are_relative_to_their_file(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, MINIMAL.replace("tasks.jsonl", "./tasks.jsonl")))
    assert recipe.data.train.path == str(tmp_path / "tasks.jsonl")


def test_overrides_win_over_files_and_variables_over_overrides(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "inference: {a: {port: 1111}}\n")
    recipe = load_recipe(path, ["run.steps=3", "inference.a.port=2222"], {"INFERENCE_A_PORT": "3333"})
    assert recipe.run.steps == 3
    assert recipe.inference["a"].port == 3333


def test_the_schedule_spans_the_run_unless_the_recipe_says_otherwise(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL)
    overrides = ["run.steps=5", "policies.model0.batch.minibatches=2"]
    assert load_recipe(path, overrides).optimizer("model0").total_updates == 10
    overrides.append("policies.model0.optimizer.total_updates=99")
    assert load_recipe(path, overrides).optimizer("model0").total_updates == 99


@pytest.mark.parametrize(
    ("override", "path_and_advice"),
    [
        ("run.stepz=3", ("run.stepz", "did you mean 'steps'")),
        ("run.steps=many", ("run.steps", "'many'", "integer")),
        ("run=3", ("run", "keys and values")),
        ("policies.model0.batch.size=0", ("policies.model0.batch.size", "greater than or equal to 1")),
        ("policies.model0.optimzer.lr=1", ("policies.model0.optimzer", "did you mean 'optimizer'")),
        ("policies.model0.algorithm.name=ppoo", ("policies.model0.algorithm.name", "'m2po'")),
        ("policies.model0.model.path=null", ("policies.model0.model.path", "write a model directory")),
        ("inference.a.policies=[modelX]", ("inference.a.policies", "'modelX'", "['model0']")),
        ("sampling.temperature=0", ("sampling.temperature", "above 0")),
        ("data.train={path: a.jsonl, generator: 'a.b:c'}", ("data.train", "exactly one")),
        ("evaluation.at_end=true", ("data.evaluation", "at_end to false")),
        ("data.train.samples_per_task=4", ("data", "train.samples_per_task", "rollout.group_size")),
        (
            "data.evaluation={a: {path: b, samples_per_task: 65}}",
            ("data.evaluation.a.samples_per_task (65)", "64 at most"),
        ),
        ("rollout.group_size=1", ("dynamic_sampling", "group_size to 2")),
        ("policies.model0.batch.minibatches=1000", ("batch.minibatches", "(1000)", "(256)")),
        ("orchestrator.port=50061", ("inference.a.port", "orchestrator.port", "another port")),
        ("sampling.max_new_tokens=9999", ("sampling.max_new_tokens", "context_length")),
        ("sampling.min_p=1", ("sampling.min_p", "less than 1")),
        ("sampling.temperature=.nan", ("sampling.temperature", "it should be a finite number")),
        ("optimizer=3", ("optimizer: unknown key",)),
    ],
)
def test_a_broken_recipe_is_told_by_path_and_remedy(
    tmp_path: Path, override: str, path_and_advice: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(write(tmp_path, MINIMAL), [override], {})
    for expected in path_and_advice:
        assert expected in caught.value.message


@pytest.mark.parametrize("cut", ["top_p=0.9", "top_k=5", "min_p=0.1", "min_new_tokens=2"])
def test_truncated_sampling_is_refused_where_an_engine_cannot_tell_what_was_kept(tmp_path: Path, cut: str) -> None:
    path = write(tmp_path, MINIMAL)
    scripted = "inference.a.engine=scripted"
    with pytest.raises(ConfigError) as caught:
        load_recipe(path, [scripted, f"sampling.{cut}"], {})
    for expected in (
        cut.replace("=", " "),
        "inference.a",
        "engine torch, sglang or vllm",
        "evaluation.samplings may truncate",
    ):
        assert expected in caught.value.message
    for fine in (
        [f"sampling.{cut}"],
        [f"sampling.{cut}", "inference.a.engine=sglang"],
        [scripted, f"evaluation.samplings={{sampled: {{{cut.replace('=', ': ')}}}}}"],
        [scripted, f"sampling.{cut}", "run.steps=0"],  # nothing is trained
    ):
        load_recipe(path, fine, {})
    with pytest.raises(ConfigError, match="at most 1024"):
        load_recipe(path, ["sampling.top_k=1025", "inference.a.engine=sglang"], {})


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("extends: nowhere.yaml\n", "does not exist"),
        ("extends: recipe.yaml\n", "extends itself"),
        ("- a list\n", "holds no mapping"),
        ("name: [unclosed\n", "not valid YAML"),
        (f"name: {'[' * 5000}", "nested too deeply"),
        ("name: a\ntrain: &a {train: *a}\n", "recipe.yaml:2: .*holds itself"),
        ("name: a\ntrain: &a {<<: *a, b: 1}\n", "recipe.yaml:2: .*holds itself"),
        ("name: &a [*a]\n", "recipe.yaml:1: .*holds itself"),
        (f"name: a\nrun: {{steps: {'9' * 10_000}}}\n", "recipe.yaml:2: run.steps is '999"),
        ("name: 2020-13-99\n", "recipe.yaml:1: name is '2020-13-99'"),
        ("seed: !!bool perhaps\n", "recipe.yaml:1: seed is 'perhaps', which cannot be read as bool"),
        ("seed: !!timestamp 99999-01-01\n", "recipe.yaml:1: seed is '99999-01-01', which cannot be read as timestamp"),
        ("seed: !!int ''\n", "recipe.yaml:1: seed is '', which cannot be read as int"),
        ("!!bool perhaps: 1\n", "a key is no value of its tag"),
        (f"extends: {'a/' * 3000}\n", "extends names 'a/a/.*write a path"),
        (f"extends: {'a' * 252}\n", "extends names 'aaa.*write a path"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, text: str, advice: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=advice) as caught:
        load_recipe(path)
    assert path.name in caught.value.message


@pytest.mark.parametrize(
    "override",
    [
        f"x={'[' * 5000}",
        f"{'.'.join('a' * 10_000)}=1",
        f"run.steps={'9' * 10_000}",
        "x=&a [*a]",
        "x=&a {<<: *a}",
        "x=2020-13-99",
        "x=!!bool perhaps",
    ],
)
def test_an_override_that_cannot_be_read_is_named(tmp_path: Path, override: str) -> None:
    with pytest.raises(ConfigError, match=r"^--set '") as caught:
        load_recipe(write(tmp_path, MINIMAL), [override])
    assert len(caught.value.message) < 1000


def test_the_name_of_a_recipe_of_rollmill_finds_it_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_recipe(Path("quickstart")).name == "quickstart"


def test_a_folder_of_ones_own_goes_before_a_recipe_of_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart").mkdir()
    write(tmp_path / "quickstart", MINIMAL)
    assert load_recipe(Path("quickstart")).name == "tiny"


def test_a_name_that_no_recipe_has_is_answered_with_those_that_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("quickstar", "recipes/quickstart", "quickstart.yaml"):
        with pytest.raises(ConfigError, match=rf"no recipe at {name}; did you mean quickstart\?") as caught:
            load_recipe(Path(name))
        named = caught.value.message.rpartition(": ")[2].split(", ")
        assert "quickstart-code" in named and "base" not in named  # which others extend, and which cannot run
