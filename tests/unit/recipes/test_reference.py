"""The recipes against their references, key by key; the rows are those of tests/unit/recipes/reference."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from services.common.config.loading import load_recipe
from services.common.config.recipe import Recipe
from tests import needs
from tests.unit.recipes.golden import REPOSITORY, load, recipes, resolved
from tests.unit.recipes.reference.names import REFERENCES
from tests.unit.recipes.reference.pages import PAGES, TABLE, file_of, written
from tests.unit.recipes.reference.table import (
    Cell,
    complaint,
    differences,
    expand,
    named,
)

NAME = "code/qwen3-8b-m2po-full"


@cache
def here(name: str) -> tuple[Recipe, dict[str, Any]]:
    recipe = load(REFERENCES[name].here)
    return recipe, resolved(recipe)


@cache
def cells() -> tuple[Cell, ...]:
    return tuple(expand(TABLE).values())


def test_every_recipe_has_a_reference_and_the_other_way_round() -> None:
    assert sorted(reference.here for reference in REFERENCES.values()) == recipes()
    assert frozenset().union(*(names for _, names in PAGES.values())) == frozenset(REFERENCES)


@pytest.mark.parametrize("name", sorted(REFERENCES))
def test_every_row_holds_for_the_resolved_recipe(name: str) -> None:
    found = [complaint(cell, *here(name)) for cell in cells() if cell.recipe == name]
    assert found and [said for said in found if said] == []


def test_every_setting_of_the_references_has_a_row_with_its_value(data_root: Path) -> None:
    needs.check("settings of the references")
    settings = json.loads((data_root / "reference_recipes" / "settings.json").read_text())
    assert sorted(settings) == sorted(REFERENCES)
    assert differences(TABLE, settings) == []


@pytest.mark.parametrize("page", PAGES)
def test_the_departures_of_a_page_are_current(page: str) -> None:
    assert file_of(page).read_text() == written(page), "run `python -m tests.unit.recipes.reference.pages`"


# The comparison can fail.


def test_no_row_is_blind() -> None:
    """A row that names settings complains when any one of them changes."""
    blind = []
    for cell in cells():
        if isinstance(cell.row.ours, str):
            recipe, settings = here(cell.recipe)
            for path in named(cell, settings):
                other = ["another"] * len(settings[path]) if isinstance(settings[path], list) else "another"
                if complaint(cell, recipe, {**settings, path: other}) is None:
                    blind.append(f"{cell.recipe} {cell.key} {path}")
    assert blind == []


def test_a_recipe_that_changes_is_found() -> None:
    settings = ["policies.model0.batch.max_staleness=7", "inference.a.num_slots=2056", "inference.a.gpus=[0, 1]"]
    recipe = load_recipe(REPOSITORY / "recipes" / NAME, settings, {})
    found = [complaint(cell, recipe, resolved(recipe)) for cell in cells() if cell.recipe == NAME]
    assert [said for said in found if said] == [
        "dataflow.buffer.max_staleness: 7 here, 8 there",
        "engine.model0.data_parallel_size: 2 here, 4 there",
        "rollout.max_concurrent_rollouts: 2056 here, 2048 there",
    ]
