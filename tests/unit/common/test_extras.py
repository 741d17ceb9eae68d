"""Extras are found by their packages, and the core starts without them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import extras
from services.common.extras import Kind, load_extra, provided

ROOT = Path(extras.__file__).parent
KINDS: tuple[Kind, ...] = ("environments", "engines", "trackers", "clusters", "commands")


@pytest.mark.parametrize("kind", KINDS)
def test_every_provided_object_loads(kind: Kind) -> None:
    for name in provided(kind):
        assert load_extra(kind, name) is not None


def test_packages_of_extras_import_nothing_when_they_are_listed() -> None:
    for package in ROOT.glob("*/__init__.py"):
        if package.parent.name != "tests":
            tree = ast.parse(package.read_text())
            imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
            assert not imports, package


def test_every_extra_has_a_readme_and_tests() -> None:
    for package in ROOT.glob("*/__init__.py"):
        assert (package.parent / "README.md").is_file(), package.parent
        assert list((package.parent / "tests").glob("test_*.py")), package.parent
