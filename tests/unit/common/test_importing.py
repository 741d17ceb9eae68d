"""Import paths in recipes: found from the current directory, or an error that says which part is wrong."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.common import importing
from services.common.errors import ConfigError
from services.common.importing import check_can_be_loaded, load_object, look_in


@pytest.fixture(autouse=True)
def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A user's folder with modules of its own."""
    (tmp_path / "my_rewards.py").write_text("def exact(row, text):\n    return 1.0\n\nclass Graders:\n    strict = 7\n")
    (tmp_path / "my_broken.py").write_text("import no_such_package_anywhere\n")
    (tmp_path / "my_typo.py").write_text("def exact(:\n")
    (tmp_path / "my_crash.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = set(sys.modules)
    yield
    for name in set(sys.modules) - known:
        del sys.modules[name]


def test_dots_after_the_colon_reach_inside() -> None:
    assert load_object("my_rewards:Graders.strict") == 7


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("my_rewards", "write it as package.module:name"),
        (":exact", "write it as package.module:name"),
        ("my_rewards:", "write it as package.module:name"),
        ("my_reward:exact", "there is no module 'my_reward'"),
        ("json.no_such_part:exact", "there is no module 'json.no_such_part'"),
        ("my_rewards:exakt", "my_rewards has no 'exakt'; it has exact, Graders"),
        ("my_rewards:Graders.lax", "has no 'lax'"),
        ("my_broken:exact", "importing my_broken needs 'no_such_package_anywhere', which is not installed"),
        ("my_typo:exact", "importing my_typo failed: SyntaxError"),
        ("my_crash:exact", "importing my_crash failed: ZeroDivisionError"),
    ],
)
def test_what_is_wrong_is_said(path: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_object(path)
    assert said in caught.value.message
    assert path in caught.value.message


@pytest.mark.parametrize(
    "path", ["my_rewards:exact", "my_rewards:Graders.strict", "my_crash:x", "json.decoder:JSONDecoder", "torch:Tensor"]
)
def test_what_is_only_looked_for_is_not_run(path: str, tmp_path: Path) -> None:
    (tmp_path / "my_crash.py").write_text("x = 1\n1 / 0\n")
    loaded = set(sys.modules)
    check_can_be_loaded(path)
    assert set(sys.modules) == loaded


def test_names_that_a_module_binds_in_any_way_are_seen(tmp_path: Path) -> None:
    (tmp_path / "my_names.py").write_text(
        "import os.path as p\nfrom json import loads\na, (b, *c) = 1, (2, 3)\nif a:\n    d: int = 4\nelse:\n"
        "    def e():\n        hidden = 1\n"
    )
    for name in ("p", "loads", "a", "b", "c", "d", "e"):
        check_can_be_loaded(f"my_names:{name}")
    with pytest.raises(ConfigError, match=r"my_names has no 'hidden'; it has a, b, c, d, e, loads, p"):
        check_can_be_loaded("my_names:hidden")
    (tmp_path / "my_star.py").write_text("from json import *\n")
    check_can_be_loaded("my_star:loads")


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("my_reward:exact", "there is no module 'my_reward'"),
        ("my_rewards.deep:exact", "there is no module 'deep'"),
        ("my_rewards:exactly", "has no 'exactly'; it has Graders, exact"),
        ("my_typo:exact", "cannot be read"),
        ("my_rewards", "is no import path"),
    ],
)
def test_what_cannot_be_loaded_is_told_without_running_it(path: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        check_can_be_loaded(path)


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("my_typo:exact", "my_typo.py:1: "),
        ("my_crash:exact", "my_crash.py:1: "),
        ("my_broken:exact", "my_broken.py:1: "),
    ],
)
def test_a_module_that_fails_is_told_with_file_and_line(path: str, place: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_object(path)
    assert caught.value.message.startswith(str(tmp_path / place))


def test_the_line_is_that_of_the_user_however_deep_it_fails(tmp_path: Path) -> None:
    (tmp_path / "my_outer.py").write_text("import json\n\nimport my_inner\n")
    (tmp_path / "my_inner.py").write_text("\n\n\nraise RuntimeError('no')\n")
    with pytest.raises(
        ConfigError, match=r"my_inner\.py:4: my_outer:exact: importing my_outer failed: RuntimeError: no"
    ):
        load_object("my_outer:exact")


def test_an_import_of_our_inside_that_is_gone_is_told_with_the_new_package(tmp_path: Path) -> None:
    (tmp_path / "my_old.py").write_text("\nfrom services.inference.workflows.gone import Outcome\n")
    (tmp_path / "my_older.py").write_text("from services.common.records import Gone\n")
    for name, line in (("my_old", 2), ("my_older", 1)):
        with pytest.raises(ConfigError, match=rf"{name}\.py:{line}: .*Import public names from `rollmill`"):
            load_object(f"{name}:exact")


def test_a_folder_of_the_user_that_our_package_hides_is_named(tmp_path: Path) -> None:
    (tmp_path / "services").mkdir()
    (tmp_path / "services" / "mine.py").write_text("def reward(task, completion): return 1.0\n")
    for check in (load_object, check_can_be_loaded):
        with pytest.raises(
            ConfigError, match=rf"no module .*{tmp_path}/services is hidden by another 'services'.*another name"
        ):
            check("services.mine:reward")


def test_a_file_of_the_user_that_the_standard_library_hides_is_named(tmp_path: Path) -> None:
    (tmp_path / "types.py").write_text("def reward(task, completion): return 1.0\n")
    with pytest.raises(ConfigError, match=rf"types has no 'reward'.*{tmp_path}/types.py is hidden by another 'types'"):
        load_object("types:reward")


def test_a_folder_without_an_init_file_is_not_hidden_by_itself(tmp_path: Path) -> None:
    (tmp_path / "my_folder").mkdir()
    (tmp_path / "my_folder" / "rewards.py").write_text("def exact(task, completion): return 1.0\n")
    with pytest.raises(ConfigError, match=r"has no 'exakt'; it has exact$"):
        load_object("my_folder.rewards:exakt")


def test_modules_beside_the_recipe_are_found_after_those_of_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importing, "_directories", [])
    beside = tmp_path / "recipes"
    beside.mkdir()
    (beside / "my_beside.py").write_text("here = 1\n")
    (beside / "my_rewards.py").write_text("exact = 2\n")
    look_in([str(beside), str(tmp_path / "of another machine")])
    assert load_object("my_beside:here") == 1
    assert load_object("my_rewards:exact")({}, "") == 1.0


def test_a_script_that_leaves_when_it_is_imported_is_told(tmp_path: Path) -> None:
    (tmp_path / "my_script.py").write_text("import sys\n\nsys.exit('usage: my_script FILE')\n")
    with pytest.raises(
        ConfigError, match=r"my_script\.py:3: my_script:main: importing my_script failed: SystemExit: usage"
    ):
        load_object("my_script:main")


def test_an_error_in_an_installed_package_is_told_with_the_line_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "my_settings.py").write_text('import yaml\n\nread = yaml.safe_load("a: [")\n')
    with pytest.raises(
        ConfigError, match=r"my_settings\.py:3: my_settings:read: importing my_settings failed: ParserErr"
    ):
        load_object("my_settings:read")
