"""READMEs of the families and docs/recipes: every link leads somewhere, and every recipe is named where users look."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unit.recipes.golden import FAMILIES, REPOSITORY, recipes

PAGES = sorted(
    [
        *(REPOSITORY / "recipes").rglob("README.md"),
        *(REPOSITORY / "docs" / "recipes").glob("*.md"),
        REPOSITORY / "deploy" / "README.md",
    ]
)


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if target.startswith("http"):
            continue
        file, _, anchor = target.partition("#")
        found = (page.parent / file).resolve() if file else page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), target


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_files_that_are_named_exist(page: Path) -> None:
    named = re.findall(r"\b((?:deploy/launch|services|recipes|docs)/[\w./-]+\.(?:sh|py|md|yaml))", page.read_text())
    assert [file for file in named if not (REPOSITORY / file).is_file()] == []


@pytest.mark.parametrize("name", recipes())
def test_each_recipe_is_in_the_readme_of_its_family(name: str) -> None:
    family, _, recipe = name.partition("/")
    assert f"`{recipe}`" in (REPOSITORY / "recipes" / family / "README.md").read_text()


def test_commands_in_the_documents_name_recipes_that_exist() -> None:
    families = "|".join(FAMILIES)
    for page in PAGES:
        for path in re.findall(rf"recipes/(?:{families})/[\w.-]+", page.read_text()):
            assert (REPOSITORY / path).exists(), f"{page}: {path}"
