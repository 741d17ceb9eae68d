"""What the packages of ``extras/`` add, by kind and name. Only what is asked for is imported."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Mapping
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any, Literal

from services.common.importing import load_object

Kind = Literal[
    "settings",
    "environments",
    "servers",
    "task_server",
    "task_checks",
    "stand_ins",
    "datasets",
    "graders",
    "judge_http",
    "queues",
    "workers",
    "tool_servers",
    "server_checks",
    "workflows",
    "engines",
    "trackers",
    "metrics",
    "commands",
]


def _packages() -> list[str]:
    """Where the packages lie: in the folder beside ``services``, also if a folder of the user's is called ``extras``."""
    spec = PathFinder.find_spec("extras", [str(Path(__file__).parents[2])])
    if spec is None or spec.loader is None:
        return []
    if getattr(sys.modules.get("extras"), "__file__", None) != spec.origin:
        sys.modules["extras"] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules["extras"])
    return list(spec.submodule_search_locations or [])


_PACKAGES = _packages()  # at the start of a process, before modules of the user are imported


@cache
def provided(kind: Kind) -> Mapping[str, str]:
    """Import paths (``package.module:name``) by name; empty where no extra of the kind is installed.

    Raises:
        ValueError: for a name that two extras provide.
    """
    paths: dict[str, str] = {}
    for package in sorted(entry.name for entry in pkgutil.iter_modules(_PACKAGES, "extras.") if entry.ispkg):
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
