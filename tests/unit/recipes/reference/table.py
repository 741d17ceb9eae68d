"""Rows of the table: a key of the reference, its value there, and its counterpart here. ``complaint`` compares them.

A key may hold ``{trainer}``, ``{model}`` and ``{evaluation}``, names that differ between recipes of the reference; the
path of a setting here may hold ``{model}``, ``{evaluation}`` and ``{service}``, and ``*`` for any name.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from services.common.config.recipe import Recipe
from tests.unit.recipes.reference.names import REFERENCES, Recipes

EXPERIMENT, RAAS, HYDRA = "experiment", "raas", "hydra"
"""Kinds of files of the reference; a hydra file is the only one of its recipe."""
CODE = "code"
"""Instead of a file: behaviour of the reference's code that no setting controls. The key is then a few words."""

Kind = Literal["same", "departs", "fixed", "absent"]
Place = Mapping[str, str]
"""The values of ``{model}``, ``{evaluation}`` and ``{service}`` here."""
Reader = Callable[[Recipe, Place], Any]
Conversion = Callable[[Any, Recipe], Any]


def as_is(value: Any, recipe: Recipe) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class Per:
    """A value of each recipe, where they differ."""

    values: tuple[tuple[Recipes, Any], ...]

    def of(self, name: str) -> Any:
        found = [value for recipes, value in self.values if name in recipes]
        if len(found) != 1:
            raise ValueError(f"{name} has {len(found)} values of {self.values}")
        return found[0]


@dataclass(frozen=True, slots=True)
class Text:
    """A long text of the reference, known by its digest: a setting is a fact, a text has an author."""

    sha256: str
    what: str

    def matches(self, text: Any) -> bool:
        return isinstance(text, str) and hashlib.sha256(text.encode()).hexdigest() == self.sha256


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One key of the reference in some of its recipes."""

    kind: Kind
    key: str
    there: Any
    ours: str | Reader | None = None
    here: Any = None
    convert: Conversion = as_is
    why: str = ""
    aspect: str = ""  # where several settings here answer one key there
    of: Recipes = frozenset()
    file: str = ""

    def value_there(self, name: str) -> Any:
        return self.there.of(name) if isinstance(self.there, Per) else self.there

    def value_here(self, name: str) -> Any:
        return self.here.of(name) if isinstance(self.here, Per) else self.here


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One key of one file of one recipe of the reference, with its row."""

    recipe: str
    file: str
    key: str
    row: Row
    place: Place

    @property
    def there(self) -> Any:
        return self.row.value_there(self.recipe)


def expand(table: Iterable[Row]) -> dict[tuple[str, str, str, str], Cell]:
    """(recipe, file, key, aspect) -> its row; two rows for one are refused."""
    cells: dict[tuple[str, str, str, str], Cell] = {}
    for row in table:
        for name in sorted(row.of):
            for cell in _cells(row, name):
                where = (name, cell.file, cell.key, row.aspect)
                if where in cells:
                    raise ValueError(f"two rows answer {' '.join(where)}: {cells[where].row} and {row}")
                cells[where] = cell
    return cells


def _cells(row: Row, name: str) -> Iterator[Cell]:
    reference = REFERENCES[name]
    files = {file: service for file, service in reference.files.items() if row.file in (file, _kind(file))}
    files = {CODE: "*"} if row.file == CODE else files
    models = reference.models if "{model}" in row.key else {"": ""}
    evaluations = reference.evaluations if "{evaluation}" in row.key else {"": ""}
    for file, service in files.items():
        for model, our_model in models.items():
            for evaluation, our_evaluation in evaluations.items():
                theirs = {"trainer": reference.trainer, "model": model, "evaluation": evaluation}
                ours = {"model": our_model, "evaluation": our_evaluation, "service": service}
                yield Cell(recipe=name, file=file, key=filled(row.key, theirs), row=row, place=ours)


def _kind(file: str) -> str:
    return EXPERIMENT if file == "experiment.yaml" else RAAS if file.startswith("raas") else HYDRA


def filled(pattern: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        pattern = pattern.replace(f"{{{name}}}", value)
    return pattern


def here_of(cell: Cell, recipe: Recipe, settings: Mapping[str, Any]) -> Any:
    """The value that the resolved recipe has for a cell; that of all settings that its path names.

    Raises:
        LookupError: the path names none, or settings that differ.
    """
    ours = cell.row.ours
    if not isinstance(ours, str):
        assert ours is not None, cell
        return ours(recipe, cell.place)
    path = filled(ours, cell.place)
    place = path.rpartition(".")[2]
    values = [settings[name][int(place)] if place.isdigit() else settings[name] for name in named(cell, settings)]
    if not values:
        raise LookupError(f"the recipe has no {path}")
    if any(_json(value) != _json(values[0]) for value in values):
        raise LookupError(f"{path} differs within the recipe: {values}")
    return values[0]


def named(cell: Cell, settings: Mapping[str, Any]) -> list[str]:
    """The settings that the path of a cell names; a number at its end is a place in a list."""
    assert isinstance(cell.row.ours, str), cell
    path = filled(cell.row.ours, cell.place)
    whole, _, last = path.rpartition(".")
    pattern = re.compile(re.escape(whole if last.isdigit() else path).replace(r"\*", "[^.]+"))
    return [name for name in settings if pattern.fullmatch(name)]


def complaint(cell: Cell, recipe: Recipe, settings: Mapping[str, Any]) -> str | None:
    """The reason why a row does not hold for a recipe; else None."""
    row = cell.row
    if row.kind != "same" and not row.why.strip():
        return f"{cell.key}: a {row.kind} row needs a reason"
    if row.kind in ("fixed", "absent"):
        return None
    try:
        here = here_of(cell, recipe, settings)
    except LookupError as error:
        return f"{cell.key}: {error}"
    wanted = row.convert(cell.there, recipe)
    if row.kind == "same":
        return None if _json(here) == _json(wanted) else f"{cell.key}: {here!r} here, {wanted!r} there"
    if here == wanted:
        return f"{cell.key}: {here!r} here as there, yet the row is a departure"
    expected = row.value_here(cell.recipe)
    return None if _json(here) == _json(expected) else f"{cell.key}: {here!r} here, but the row says {expected!r}"


def differences(table: Iterable[Row], settings: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[str]:
    """Where the table and the files of the reference (recipe -> file -> key -> value) disagree; empty when they do not."""
    cells: dict[tuple[str, str, str], list[Cell]] = {}
    for (recipe, file, key, _), cell in expand(table).items():
        if cell.row.file != CODE:
            cells.setdefault((recipe, file, key), []).append(cell)
    values = {
        (n, file, key): value
        for n, files in settings.items()
        for file, keys in files.items()
        for key, value in keys.items()
    }
    found = [f"no row answers {' '.join(where)}" for where in values if where not in cells]
    for where, rows_of_key in cells.items():
        if where not in values:
            found.append(f"a row answers {' '.join(where)}, which the file lacks")
            continue
        value = values[where]
        for cell in rows_of_key:
            there = cell.there
            if not (there.matches(value) if isinstance(there, Text) else _json(there) == _json(value)):
                found.append(f"{' '.join(where)}: {value!r} in the file, but {there!r} in its row")
    return found


def _json(value: Any) -> str:
    """Equal texts are equal values of one type: 1 is neither 1.0 nor true."""
    return json.dumps(value)
