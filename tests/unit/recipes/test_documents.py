"""READMEs of the families: every recipe is named where users look, and commands name recipes that exist."""

from __future__ import annotations

import re

import pytest

from tests.unit.recipes.golden import FAMILIES, REPOSITORY, recipes

PAGES = sorted([*(REPOSITORY / "recipes").rglob("README.md"), REPOSITORY / "deploy" / "README.md"])


@pytest.mark.parametrize("name", recipes())
def test_each_recipe_is_in_the_readme_of_its_family(name: str) -> None:
    family, _, recipe = name.partition("/")
    assert f"`{recipe}`" in (REPOSITORY / "recipes" / family / "README.md").read_text()


def test_commands_in_the_documents_name_recipes_that_exist() -> None:
    families = "|".join(FAMILIES)
    for page in PAGES:
        for path in re.findall(rf"recipes/(?:{families})/[\w.-]+", page.read_text()):
            assert (REPOSITORY / path).exists(), f"{page}: {path}"
