"""Objects named by import path in a recipe: ``package.module:name``.

Modules are looked for in the current directory, in the directories of ``look_in`` (the recipe's own folder), and where Python
looks anyway.
"""

from __future__ import annotations

import ast
import importlib
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from services.common.errors import ConfigError
from services.common.user_code import RAISED, place_of_error, told

_directories: list[str] = []  # besides the current one


def look_in(directories: Iterable[str]) -> None:
    """From now on find modules in these directories as well, after the current one; those that are not here do not count."""
    _directories.extend(place for place in directories if place not in _directories and Path(place).is_dir())


def directories() -> list[str]:
    """Where the user's modules are looked for, the first place first."""
    return [os.getcwd(), *_directories]


def load_object(path: str) -> Any:
    """The object behind ``package.module:name``.

    Raises:
        ConfigError: with the part that was not found, or the file and line where a module failed.
    """
    module_name, colon, name = path.partition(":")
    if not colon or not module_name or not name:
        raise ConfigError(f"{path!r} is no import path; write it as package.module:name")
    _make_findable()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise _not_found(path, module_name, error) from error
    except RAISED as error:  # the user's code runs here, and can raise anything
        raise ConfigError(
            f"{place_of_error(error)}{path}: importing {module_name} failed: {told(error)}{_old_name(error)}"
        ) from error
    target: Any = module
    for part in name.split("."):
        if not hasattr(target, part):
            known = ", ".join(n for n in vars(module) if not n.startswith("_"))
            raise ConfigError(
                f"{_file_of(module)}{path}: {module_name} has no {part!r}; it has "
                f"{known or 'no public names'}{_hidden(module_name)}"
            )
        target = getattr(target, part)
    return target


def check_can_be_loaded(path: str) -> None:
    """Check that ``load_object`` would find ``package.module:name``, without running any of its code.

    For a process that must not import the module's dependencies, such as torch. A module without Python source is taken
    to have the name.

    Raises:
        ConfigError: as ``load_object``.
    """
    definition_of(path)


@dataclass(frozen=True, slots=True)
class Definition:
    """A function or class as written in its file."""

    file: str
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

    def check_function(self, path: str, num_arguments: int, wanted: str) -> None:
        """Raises ``ConfigError`` for a function that cannot be called with so many positional arguments; ``wanted`` is the
        line to write."""
        if isinstance(self.node, ast.ClassDef):
            return
        parameters = self.node.args
        most = len(parameters.posonlyargs) + len(parameters.args)
        least = most - len(parameters.defaults)
        needs_more = any(default is None for default in parameters.kw_defaults)
        if least > num_arguments or (most < num_arguments and parameters.vararg is None) or needs_more:
            raise ConfigError(
                f"{self.file}:{self.node.lineno}: {path} is `def {self.node.name}({ast.unparse(parameters)})`, which cannot be "
                f"called with {num_arguments} arguments: write `{wanted}`"
            )

    def check_class(self, path: str, bases: Sequence[str], methods: Mapping[str, str]) -> None:
        """Raises ``ConfigError`` for a class that lacks one of the methods, and whose bases are ``object`` or among ``bases``,
        which lack them too; ``methods`` maps names to the lines to write."""
        if not isinstance(self.node, ast.ClassDef) or not {ast.unparse(base) for base in self.node.bases} <= {
            *bases,
            "object",
        }:
            return
        names = _names_of(self.node)
        missing = [wanted for name, wanted in methods.items() if name not in names]
        if missing and "*" not in names:
            raise ConfigError(
                f"{self.file}:{self.node.lineno}: the class {path} lacks {'a method' if len(missing) == 1 else 'methods'}: "
                f"write {', '.join(f'`{wanted}`' for wanted in missing)}"
            )


def definition_of(path: str) -> Definition | None:
    """The definition that ``package.module:name`` has in its file, which is read and not run; None where the name is bound in
    another way.

    Raises:
        ConfigError: as ``load_object``.
    """
    module_name, colon, name = path.partition(":")
    if not colon or not module_name or not name:
        raise ConfigError(f"{path!r} is no import path; write it as package.module:name")
    _make_findable()
    package, *parts = module_name.split(".")
    spec = find_spec(package)  # of a name with dots it would import the packages
    for part in (package, *parts):
        if part is not package:
            spec = PathFinder.find_spec(part, list(spec.submodule_search_locations or ())) if spec else None
        if spec is None:
            raise ConfigError(f"{path}: there is no module {part!r}; {_where_looked()}{_hidden(module_name)}")
    assert spec is not None
    if spec.origin is None or not spec.origin.endswith(".py"):
        return None
    try:
        tree = ast.parse(Path(spec.origin).read_bytes())
    except SyntaxError as error:
        raise ConfigError(f"{spec.origin}:{error.lineno or 1}: {path} cannot be read: {error.msg}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {spec.origin} cannot be read: {error}") from error
    names = _names_of(tree)
    first = name.split(".")[0]
    if "*" not in names and first not in names:
        known = ", ".join(sorted(n for n in names if not n.startswith("_")))
        raise ConfigError(
            f"{spec.origin}: {path}: {module_name} has no {first!r}; it has {known or 'no public names'}{_hidden(module_name)}"
        )
    found = names.get(name)
    return None if found is None else Definition(spec.origin, found)


def _file_of(module: Any) -> str:
    file = getattr(module, "__file__", None)
    return f"{file}: " if file else ""


def _make_findable() -> None:
    """The user's modules come before installed ones: the current directory first, then those of ``look_in``."""
    for place in reversed(directories()):
        if place not in sys.path:
            sys.path.insert(0, place)


def _not_found(path: str, module_name: str, error: ModuleNotFoundError) -> ConfigError:
    if error.name is not None and not f"{module_name}.".startswith(f"{error.name}."):
        if error.name.partition(".")[0] == "services":
            return ConfigError(
                f"{place_of_error(error)}{path}: importing {module_name} failed: {error}{_old_name(error)}"
            )
        return ConfigError(
            f"{place_of_error(error)}{path}: importing {module_name} needs {error.name!r}, which is not installed"
        )
    return ConfigError(f"{path}: there is no module {error.name!r}; {_where_looked()}{_hidden(module_name)}")


def _where_looked() -> str:
    others = "".join(f" or {place}" for place in _directories)
    return f"is it spelt right, and is the current directory ({os.getcwd()}){others} the one that holds it?"


def _old_name(error: BaseException) -> str:
    """The correction of an import of an internal module, which users do not name."""
    name = getattr(error, "name", None) or ""
    if isinstance(error, ImportError) and name.partition(".")[0] == "services":
        return f". Import public names from `rollmill` (import rollmill; docs/reference){_hidden(name)}"
    return ""


def _hidden(module_name: str) -> str:
    """A sentence about a module of the user's that has the name of another one, which was found in its place."""
    top = module_name.partition(".")[0]
    if top == "recipes" and (other := find_spec(top)) is not None and other.origin:  # Rollmill's have no such file
        return f". {other.origin} hides the modules of Rollmill's recipes: remove this file, or give the folder another name"
    loaded = sys.modules.get(top)
    for place in directories():
        for own in (Path(place, f"{top}.py"), Path(place, top)):
            if not own.exists() or loaded is None:
                continue
            if own.resolve() in (Path(part).resolve() for part in getattr(loaded, "__path__", ())):
                continue  # a folder without __init__.py has no file
            file = getattr(loaded, "__file__", None)
            if file is None or not Path(file).resolve().is_relative_to(own.resolve()):
                return f". {own} is hidden by another {top!r} ({file or 'built in'}): give yours another name"
    return ""


def _names_of(tree: ast.AST) -> dict[str, Any]:
    """The names that a module binds outside its functions and classes, each with its definition, if any; ``*`` where an
    import hides the names."""
    names: dict[str, Any] = {}
    pending: list[ast.AST] = list(ast.iter_child_nodes(tree))
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names[node.name] = node
            continue
        if isinstance(node, ast.alias):
            names.setdefault((node.asname or node.name).split(".")[0], None)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.setdefault(node.id, None)
        pending.extend(ast.iter_child_nodes(node))
    return names
