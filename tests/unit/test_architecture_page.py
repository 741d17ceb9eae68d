"""docs/architecture.md: the drawing is that of the code, and the glossary has each term once."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def imports() -> ModuleType:
    spec = importlib.util.spec_from_file_location("imports_drawing", REPOSITORY / "docs" / "site" / "imports.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_drawing_of_imports_is_current(imports: ModuleType) -> None:
    drawn = imports.drawing(imports.ROOT / "services" / name for name in imports.SERVICES)
    assert (REPOSITORY / "docs" / "imports.svg").read_text() == drawn, "run `python docs/site/imports.py`"


def test_imports_between_folders_are_found(imports: ModuleType, tmp_path: Path) -> None:
    service = tmp_path / "services" / "x"
    sources = {
        "app.py": "from services.x import core",
        "core.py": "import services.x.a.one",
        "a/one.py": "from services.x.b.two import f\nfrom services.common import y",
        "b/two.py": "import os",
    }
    for name, text in sources.items():
        (service / name).parent.mkdir(parents=True, exist_ok=True)
        (service / name).write_text(text)
    assert imports.graph(service) == {
        "app": frozenset({"top"}),
        "top": frozenset({"a"}),
        "a": frozenset({"b"}),
        "b": frozenset(),
    }
    assert imports.rows(imports.graph(service)) == [["app"], ["top"], ["a"], ["b"]]


def test_folders_that_import_each_other_share_a_row_and_implied_arrows_are_left_out(imports: ModuleType) -> None:
    edges = {"a": {"b", "c", "d"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}
    assert imports.rows(edges) == [["a"], ["b", "c"], ["d"]]
    drawn = imports.drawn_edges(edges)
    assert ("a", "d") not in drawn and {("b", "c"), ("c", "b"), ("c", "d")} <= set(drawn)


def test_the_glossary_has_each_term_once_in_order() -> None:
    page = (REPOSITORY / "docs" / "architecture.md").read_text()
    table = page[page.index("| term | meaning |") :].split("\n\n")[0]
    terms = re.findall(r"^\| ([a-z][^|]*) \|", table, flags=re.MULTILINE)[1:]
    assert len(terms) > 50 and terms == sorted(set(terms))
