"""The possible effects of a run directory, a recipe, a model or a data set of another author, as in docs/security.md."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from services.cli.__main__ import app
from services.common.config.data import DatasetConfig
from services.common.config.loading import RESOLVED, load_recipe, load_resolved, save_resolved
from services.common.errors import ConfigError, DatasetError
from services.common.text.chat import load_model, load_tokenizer
from services.orchestrator.tasks.datasets import open_source
from tests.unit.inference.fakes import qwen_like_tokenizer

REPOSITORY = Path(__file__).parents[3]
TRACE = "ran.txt"
MODULE = "a_strangers_module"
CODE = f"import pathlib; pathlib.Path({TRACE!r}).write_text(__name__)\n"


class Trace:
    """Leaves a trace on unpickling."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (CODE.replace("__name__", "'unpickled'"),)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a module that leaves a trace on import."""
    (tmp_path / f"{MODULE}.py").write_text(f"{CODE}def thing(*_, **__): ...\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    return tmp_path


@pytest.fixture
def run(folder: Path) -> Path:
    """A run directory with a recipe that names the module in every possible place."""
    recipe = load_recipe(REPOSITORY / "recipes" / "quickstart", ["run.id=theirs"])
    found = folder / "theirs"
    save_resolved(recipe, found)
    text = (found / RESOLVED).read_text()
    for path in (
        "recipes.quickstart.reward:boxed_answer",
        "recipes.quickstart.task:problems",
        "recipes.quickstart.model:make",
    ):
        text = text.replace(path, f"{MODULE}:thing")
    assert f"{MODULE}:thing" in text
    (found / RESOLVED).write_text(text)
    (found / "journal").mkdir()
    (found / "journal" / "0.jsonl").write_bytes(b'{"kind": "nonsense"}\n[1]\n\x00\xff\n{"task_group_id": "g"}\n')
    return found


@pytest.mark.parametrize(
    "command",
    [["plot"], ["trajectories"], ["weights"], ["trace"], ["trace", "--list"], ["fate"], ["status"]],
    ids=" ".join,
)
def test_reading_a_strangers_run_runs_nothing_of_it(folder: Path, run: Path, command: list[str]) -> None:
    name, *options = command
    CliRunner().invoke(app, [name, str(run), *options])  # most of them find too little to show
    assert load_resolved(run).run.id == "theirs"
    assert MODULE not in sys.modules and not (folder / TRACE).exists()


def test_checking_a_strangers_recipe_runs_its_code(folder: Path, run: Path) -> None:
    """A recipe is code: `rollmill check` is not a look at text alone, and the documentation says so."""
    CliRunner().invoke(app, ["check", str(run / RESOLVED)])
    (folder / "recipe.yaml").write_text(yaml.safe_dump(load_resolved(run).model_dump(mode="json")))
    CliRunner().invoke(app, ["check", str(folder / "recipe.yaml")])
    assert (folder / TRACE).exists()


@pytest.mark.parametrize("name", ["run.id", "name"])
@pytest.mark.parametrize("value", ["../out", "/tmp/out", "a/b", "..", ".", "a\\b", "a\nb", "a\x1b[2Jb"])
def test_the_name_of_a_run_leads_out_of_no_directory(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match="name of a directory"):
        load_recipe(REPOSITORY / "recipes" / "quickstart", [f"{name}={yaml.safe_dump(value, default_style=chr(34))}"])


@pytest.mark.parametrize("kind", ["policies", "inference"])
@pytest.mark.parametrize("value", ["../out", "a/b", "..", "a.b", "", "a b", "a\\b"])
def test_the_name_of_a_policy_or_service_leads_out_of_no_directory(tmp_path: Path, kind: str, value: str) -> None:
    tree = load_recipe(REPOSITORY / "recipes" / "quickstart").model_dump(mode="json")
    tree[kind] = {value: next(iter(tree[kind].values()))}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree))
    with pytest.raises(ConfigError, match="plain name"):
        load_recipe(tmp_path)


@pytest.mark.parametrize(
    "text", ["!!python/object/apply:os.system ['touch ran.txt']", "!!python/name:os.system", "a: !!python/module:os"]
)
def test_a_recipes_yaml_makes_no_objects(folder: Path, text: str) -> None:
    (folder / "recipe.yaml").write_text(f"name: x\ndescription: {text}\n")
    with pytest.raises(ConfigError):
        load_recipe(folder)
    assert not (folder / TRACE).exists()


def test_the_picture_of_a_run_is_not_written_through_its_link(folder: Path, run: Path) -> None:
    (folder / "mine.txt").write_text("mine")
    (run / "run.png").symlink_to(folder / "mine.txt")
    result = CliRunner().invoke(app, ["plot", str(run)])
    assert result.exit_code != 0 and (folder / "mine.txt").read_text() == "mine"


# -- models ---------------------------------------------------------------------------------------------------------------


def model_of(folder: Path, **config: Any) -> Path:
    import json

    made = {
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 8, "intermediate_size": 8,
        "num_attention_heads": 1, "num_hidden_layers": 1, "num_key_value_heads": 1, "vocab_size": 8, **config,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(made))
    return folder


def test_code_beside_a_model_is_not_run_and_not_asked_about(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: object) -> str:
        raise AssertionError("a question at the terminal")

    monkeypatch.setattr("builtins.input", asked)
    code = {"AutoConfig": f"{MODULE}.Config", "AutoModelForCausalLM": f"{MODULE}.Model"}
    for config in ({"auto_map": code, "model_type": "theirs"}, {"auto_map": code}):
        with pytest.raises(ConfigError):
            load_model(str(model_of(folder, **config)))
    (folder / "tokenizer_config.json").write_text(
        f'{{"tokenizer_class": "Theirs", "auto_map": {{"AutoTokenizer": ["{MODULE}.Tokenizer", null]}}}}'
    )
    with pytest.raises(ConfigError):
        load_tokenizer(str(folder))
    assert not (folder / TRACE).exists()


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('touch ran.txt') }}",
        "{% set x = messages.append({'role': 'user', 'content': 'more'}) %}",
        "{{ self.__init__.__globals__ }}",
    ],
)
def test_a_chat_template_reaches_nothing_but_its_messages(folder: Path, template: str) -> None:
    import copy

    tokenizer = copy.deepcopy(qwen_like_tokenizer())
    tokenizer.chat_template = template
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(Exception, match=r"unsafe|undefined"):
        tokenizer.apply_chat_template(messages, tokenize=False)
    assert messages == [{"role": "user", "content": "x"}] and not (folder / TRACE).exists()


# -- data sets ------------------------------------------------------------------------------------------------------------


def test_a_data_sets_script_is_not_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    theirs = folder / "theirs"
    theirs.mkdir()
    (theirs / "theirs.py").write_text(CODE)
    (theirs / "data.pkl").write_bytes(pickle.dumps(Trace()))
    with pytest.raises(DatasetError):
        open_source(DatasetConfig(path=str(theirs)), 1)
    assert not (folder / TRACE).exists()
