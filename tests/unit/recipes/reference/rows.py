"""The rows that the YAML files of this folder hold.

A file is a list of sections, each of one kind of file of the reference (``file``) and of the recipes ``of``. An entry is

    same: KEY, there: VALUE, ours: PATH            the value here is the reference's, after ``convert``
    departs: KEY, there:, ours:, here:, why:       another value, for a reason
    fixed: {KEY: VALUE, ...}, why:                 the same values, without a key here
    absent: {KEY: VALUE, ...}, why:                no such settings here, for a reason

``read`` instead of ``ours`` names a reader of reading.py with its arguments; ``convert`` a conversion of reading.py, or a
mapping of words there to words here, which words.yaml may hold. ``aspect`` tells entries apart where several settings here answer one key there.
``of`` names recipes or sets of names.py, with those to leave out behind a minus. ``!per`` is a value of each recipe,
``!text`` a long text known by its digest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.unit.recipes.reference import names, reading
from tests.unit.recipes.reference.table import Per, Row, Text, as_is

WORDS = yaml.safe_load(Path(__file__).with_name("words.yaml").read_text())


class _Loader(yaml.SafeLoader):
    """YAML with ``!per`` and ``!text``."""


_Loader.add_constructor(
    "!per",
    lambda loader, node: Per(
        tuple((recipes(of), value) for of, value in loader.construct_mapping(node, deep=True).items())
    ),
)
_Loader.add_constructor("!text", lambda loader, node: Text(**loader.construct_mapping(node)))


def recipes(said: str) -> names.Recipes:
    """``DAPO -PAIRS`` or a recipe's own name."""
    found: names.Recipes = frozenset()
    for word in said.split():
        name = word.removeprefix("-")
        named = frozenset({name}) if name in names.REFERENCES else getattr(names, name)
        found = found - named if word.startswith("-") else found | named
    return found


def load(file: str) -> list[Row]:
    """The rows of a file of this folder, in its order."""
    sections = yaml.load(Path(__file__).with_name(file).read_text(), _Loader)  # a safe loader
    return [row for section in sections for entry in section["rows"] for row in _rows(section, entry)]


def _rows(section: Mapping[str, Any], entry: Mapping[str, Any]) -> Iterator[Row]:
    kind = next(kind for kind in ("same", "departs", "fixed", "absent") if kind in entry)
    keys = entry[kind] if kind in ("fixed", "absent") else {entry[kind]: entry["there"]}
    for key, there in keys.items():
        per = frozenset().union(*(of for of, _ in there.values)) if isinstance(there, Per) else None
        yield Row(
            kind=kind,
            key=key,
            there=there,
            ours=_called(entry["read"]) if "read" in entry else entry.get("ours"),
            here=entry.get("here"),
            convert=_conversion(entry.get("convert")),
            why=entry.get("why", ""),
            aspect=entry.get("aspect", ""),
            of=per or recipes(entry.get("of", section["of"])),
            file=section["file"],
        )


def _conversion(said: Any) -> Any:
    if said is None:
        return as_is
    found = said if isinstance(said, dict) else WORDS[said] if said in WORDS else _called(said)
    return reading.renamed(found) if isinstance(found, dict) else found


def _called(said: str) -> Any:
    """``reader``, or ``reader argument ...`` called with the arguments; one that is a number is an int."""
    name, *arguments = said.split()
    found = getattr(reading, name)
    return found(*(int(word) if word.isdigit() else word for word in arguments)) if arguments else found


M2PO_ROWS, RSTAR2_ROWS, BEHAVIOUR_ROWS = load("m2po.yaml"), load("rstar2.yaml"), load("behaviour.yaml")
