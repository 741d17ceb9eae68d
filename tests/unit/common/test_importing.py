"""Import paths in recipes: found from the current directory, or an error that says which part is wrong."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.common.errors import ConfigError
from services.common.importing import check_can_be_loaded, load_object


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


def test_a_function_beside_the_recipe_is_found() -> None:
    assert load_object("my_rewards:exact")({}, "") == 1.0


def test_dots_after_the_colon_reach_inside() -> None:
    assert load_object("my_rewards:Graders.strict") == 7


def test_an_installed_package_is_found() -> None:
    assert load_object("json:dumps")([1]) == "[1]"


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
