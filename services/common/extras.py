"""What the packages of ``extras/`` add, by kind and name. Only what is asked for is imported."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

from services.common.importing import load_object

Kind = Literal[
    "environments",
    "servers",
    "task_server",
    "task_checks",
    "stand_ins",
    "datasets",
    "graders",
    "workflows",
    "engines",
    "trackers",
    "clusters",
    "commands",
]


@cache
def provided(kind: Kind) -> Mapping[str, str]:
    """Import paths (``package.module:name``) by name; empty where no extra of the kind is installed.

    Raises:
        ValueError: for a name that two extras provide.
    """
    paths: dict[str, str] = {}
    try:
        packages = importlib.import_module("extras").__path__
    except ModuleNotFoundError:
        return paths
    for package in sorted(entry.name for entry in pkgutil.iter_modules(packages, "extras.") if entry.ispkg):
        for name, path in importlib.import_module(package).PROVIDES.get(kind, {}).items():
            if name in paths:
                raise ValueError(f"{paths[name]} and {path} both provide {name!r} of {kind}")
            paths[name] = path
    return paths


def absent(kind: Kind, name: str) -> str:
    """Why a part cannot be used that no extra provides, with the remedy."""
    return f"no folder of extras/ provides {name!r} of {kind} here: install Rollmill with its folder extras"


def load_extra(kind: Kind, name: str) -> Any:
    """The object that an extra provides. Raises ``KeyError`` for a name that ``provided`` lacks."""
    return load_object(provided(kind)[name])
