"""Objects named by import path in a recipe: ``package.module:name``."""

from __future__ import annotations

import ast
import importlib
import os
import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from services.common.errors import ConfigError


def load_object(path: str) -> Any:
    """The object behind ``package.module:name``, found from the current directory or any installed package.

    Raises:
        ConfigError: naming the part that could not be found, and what was looked for.
    """
    module_name, colon, name = path.partition(":")
    if not colon or not module_name or not name:
        raise ConfigError(f"{path!r} is no import path; write it as package.module:name")
    _look_in_current_directory()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and not f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"{path}: importing {module_name} needs {error.name!r}, which is not installed"
            ) from error
        raise ConfigError(
            f"{path}: there is no module {error.name!r}; is it spelt right, and is the current directory "
            f"({os.getcwd()}) the one that holds it?"
        ) from error
    except Exception as error:  # the user's code runs here, and can raise anything
        raise ConfigError(f"{path}: importing {module_name} failed: {type(error).__name__}: {error}") from error
    target: Any = module
    for part in name.split("."):
        if not hasattr(target, part):
            known = ", ".join(n for n in vars(module) if not n.startswith("_"))
            raise ConfigError(f"{path}: {module_name} has no {part!r}; it has {known or 'nothing public'}")
        target = getattr(target, part)
    return target


def check_can_be_loaded(path: str) -> None:
    """Whether ``load_object`` would find ``package.module:name``, without running any of its code.

    For a process that must not import what the module imports, such as torch. A module without Python source is taken to
    have the name.

    Raises:
        ConfigError: as ``load_object``.
    """
    module_name, colon, name = path.partition(":")
    if not colon or not module_name or not name:
        raise ConfigError(f"{path!r} is no import path; write it as package.module:name")
    _look_in_current_directory()
    package, *parts = module_name.split(".")
    spec = find_spec(package)  # of a name with dots it would import the packages
    for part in (package, *parts):
        if part is not package:
            spec = PathFinder.find_spec(part, list(spec.submodule_search_locations or ())) if spec else None
        if spec is None:
            raise ConfigError(
                f"{path}: there is no module {part!r}; is it spelt right, and is the current directory "
                f"({os.getcwd()}) the one that holds it?"
            )
    assert spec is not None
    if spec.origin is None or not spec.origin.endswith(".py"):
        return
    try:
        tree = ast.parse(Path(spec.origin).read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(f"{path}: {spec.origin} cannot be read: {error}") from error
    names = _names_of(tree)
    if "*" not in names and name.split(".")[0] not in names:
        known = ", ".join(sorted(n for n in names if not n.startswith("_")))
        raise ConfigError(f"{path}: {module_name} has no {name.split('.')[0]!r}; it has {known or 'nothing public'}")


def _look_in_current_directory() -> None:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a user's module lies beside the recipe, not in site-packages


def _names_of(tree: ast.Module) -> set[str]:
    """What a module binds anywhere outside its functions and classes; ``*`` where an import hides the names."""
    names: set[str] = set()
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
            continue
        if isinstance(node, ast.alias):
            names.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        pending.extend(ast.iter_child_nodes(node))
    return names
