"""The recipes against their references, key by key; the rows are those of tests/unit/recipes/reference."""

from __future__ import annotations

import json
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from services.common.config.loading import load_recipe
from services.common.config.recipe import Recipe
from tests import needs
from tests.unit.recipes.golden import REPOSITORY, load, recipes, resolved
from tests.unit.recipes.reference.behaviour import BEHAVIOUR_ROWS
from tests.unit.recipes.reference.names import REFERENCES
from tests.unit.recipes.reference.pages import PAGES, TABLE, file_of, whole, written
from tests.unit.recipes.reference.probes import PROBES
from tests.unit.recipes.reference.table import (
    EXPERIMENT,
    Cell,
    Row,
    Text,
    complaint,
    departs,
    differences,
    expand,
    fixed,
    named,
    per,
    rows,
    same,
)

NAME = "code/qwen3-8b-m2po-full"
ONE = frozenset({NAME})
STALENESS = "policies.*.batch.max_staleness"


@cache
def here(name: str) -> tuple[Recipe, dict[str, Any]]:
    recipe = load(REFERENCES[name].here)
    return recipe, resolved(recipe)


@cache
def cells() -> tuple[Cell, ...]:
    return tuple(expand(TABLE).values())


def judged(row: Row) -> str | None:
    """The complaint about one row of a recipe; its key is anything."""
    (cell,) = expand(rows(EXPERIMENT, ONE, row)).values()
    return complaint(cell, *here(NAME))


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


def test_all_rows_of_a_recipe_can_be_read() -> None:
    told = whole(REFERENCES[NAME].here)
    of_recipe = [cell for cell in cells() if cell.recipe == NAME]
    assert len(told.splitlines()) == 2 + len(of_recipe)
    assert all(f"| `{cell.key}` |" in told for cell in of_recipe)


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


@pytest.mark.parametrize(
    ("row", "told"),
    [
        (same("x", 8.0, STALENESS), "x: 8 here, 8.0 there"),
        (same("x", True, "policies.*.batch.replay.capacity"), "x: 10000 here, True there"),
        (same("x", 8, "policies.*.batch.staleness"), "x: the recipe has no policies.*.batch.staleness"),
        (same("x", 8, "policies.*.batch.*"), "x: policies.*.batch.* differs within the recipe"),
        (departs("x", 8, STALENESS, 8, "a reason"), "x: 8 here as there, yet the row is a departure"),
        (departs("x", 8.0, STALENESS, 8, "a reason"), "x: 8 here as there, yet the row is a departure"),
        (departs("x", 9, STALENESS, 7, "a reason"), "x: 8 here, but the row says 7"),
        (departs("x", 9, STALENESS, 8.0, "a reason"), "x: 8 here, but the row says 8.0"),
        (departs("x", 9, STALENESS, 8, " "), "x: a departs row needs a reason"),
        (fixed("", {"x": 1})[0], "x: a fixed row needs a reason"),
    ],
)
def test_a_row_that_is_wrong_is_told(row: Row, told: str) -> None:
    assert (judged(row) or "").startswith(told)


def test_a_row_that_is_right_is_not() -> None:
    assert judged(same("x", 8, STALENESS)) is None
    assert judged(departs("x", 9, STALENESS, 8, "a reason")) is None


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"a": 1}, []),
        ({"a": 1, "b": 2}, [f"no row answers {NAME} experiment.yaml b"]),
        ({}, [f"a row answers {NAME} experiment.yaml a, which the file lacks"]),
        ({"a": 1.0}, [f"{NAME} experiment.yaml a: 1.0 in the file, but 1 in its row"]),
        ({"a": True}, [f"{NAME} experiment.yaml a: True in the file, but 1 in its row"]),
    ],
)
def test_a_file_that_the_table_does_not_tell_whole_is_found(files: dict[str, Any], told: list[str]) -> None:
    table = rows(EXPERIMENT, ONE, fixed("a reason", {"a": 1}))
    assert differences(table, {NAME: {"experiment.yaml": files}}) == told


def test_a_text_is_known_by_its_digest() -> None:
    assert Text(sha256(b"the text").hexdigest(), "a text").matches("the text")
    assert not Text(sha256(b"the text").hexdigest(), "a text").matches("the text ")


def test_two_rows_for_one_key_are_refused() -> None:
    with pytest.raises(ValueError, match=f"two rows answer {NAME} experiment.yaml x"):
        expand(rows(EXPERIMENT, ONE, same("x", 8, STALENESS), fixed("a reason", {"x": 8})))
    with pytest.raises(ValueError, match="has 2 values"):
        judged(same("x", per((ONE, 8), (ONE, 9)), STALENESS))


# Rows about behaviour, which no key shows.

TOLD = sorted({row.key for row in BEHAVIOUR_ROWS if row.ours is None})


@pytest.mark.parametrize("key", TOLD)
async def test_a_behaviour_that_a_page_tells_is_shown_by_its_probe(key: str) -> None:
    assert key in PROBES, (
        f"write a probe for {key!r} into tests/unit/recipes/reference/probes.py: a call that fails if it is false"
    )
    shown = PROBES[key]()
    if shown is not None:
        await shown
