"""Objects named by import path in a recipe: ``package.module:name``.

Modules are looked for in the current directory, in the directories of ``look_in`` (the recipe's own folder), and where Python
looks anyway.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import symtable
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.machinery import PathFinder
from importlib.util import decode_source, find_spec
from pathlib import Path
from typing import Any

from services.common.errors import ConfigError

# --- Locates code of the user, and gives the correction where its signature does not fit.


# Of code of the user outside an event loop. KeyboardInterrupt is left out: there it is a Ctrl-C.
RAISED = (Exception, SystemExit, GeneratorExit, asyncio.CancelledError)
_SERVICES = f"{Path(__file__).resolve().parents[1]}/"


def place_of(thing: Any) -> str:
    """``FILE:LINE: `` of a function, a class or an object's class; empty where there is no Python source."""
    thing = inspect.unwrap(getattr(thing, "function", thing)) if callable(thing) else type(thing)
    if not (inspect.isclass(thing) or inspect.isfunction(thing) or inspect.ismethod(thing)):
        thing = type(thing)
    try:
        file = inspect.getsourcefile(thing)
        _, line = inspect.getsourcelines(thing)
    except (OSError, TypeError):
        return ""
    return f"{file}:{line}: "


def place_of_error(error: BaseException) -> str:
    """``FILE:LINE: `` of the deepest line of the user's that an error passed; empty where there is none.

    Lines of installed packages are named where the error passed none but those and ours.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno or 1}: "
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((_SERVICES, "<")) and "importlib" not in frame.filename
    ]
    own = [frame for frame in own if "site-packages" not in frame.filename] or own
    return f"{own[-1].filename}:{own[-1].lineno}: " if own else ""


def name_and_text(error: BaseException) -> tuple[str, str]:
    """The class name and the message of an error of the user's, whose own code for either may raise."""
    name = type.__dict__["__name__"].__get__(type(error))  # not that of a metaclass
    try:
        return name, str(error)
    except RAISED:
        return name, "its message cannot be read"


def told(error: BaseException) -> str:
    """``CLASS: MESSAGE`` of an error of the user's."""
    return ": ".join(name_and_text(error))


def check_call(
    function: Any, path: str, wanted: str, *arguments: str, keywords: Mapping[str, object] | None = None
) -> None:
    """Check that a function can be called with these positional arguments and keywords.

    ``wanted`` is the line to write, such as ``def reward(task, completion) -> float``. A function without a signature
    passes.

    Raises:
        ConfigError: the object is no function, or cannot be called so.
    """
    if not callable(function):
        raise ConfigError(f"{path} is of type {type(function).__name__}, and no function: write `{wanted}`")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*arguments, **(keywords or {}))
    except TypeError as error:
        name = getattr(function, "__name__", path.rpartition(":")[2])
        bare = [one.replace(annotation=one.empty) for one in signature.parameters.values()]
        signature = signature.replace(parameters=bare, return_annotation=signature.empty)
        raise ConfigError(
            f"{place_of(function)}{path} is `{name}{signature}`, which cannot be called as Rollmill calls it ({error}): "
            f"write `{wanted}`"
        ) from None


def check_methods(thing: Any, path: str, methods: Mapping[str, str]) -> None:
    """Check that a class, or an object, has methods that take the given arguments.

    ``methods`` maps each name to the line to write, such as ``def step(self, action)``; its parameters are those that
    the method is called with.

    Raises:
        ConfigError: with every method that is missing, or the first that takes other arguments or is not ``async``.
    """
    missing = [wanted for name, wanted in methods.items() if not callable(getattr(thing, name, None))]
    if missing:
        lines = ", ".join(f"`{wanted}`" for wanted in missing)
        kind = "the class" if inspect.isclass(thing) else "the object"
        raise ConfigError(
            f"{place_of(thing)}{kind} {path} lacks {'a method' if len(missing) == 1 else 'methods'}: write {lines}"
        )
    for name, wanted in methods.items():
        parameters = _parameters(wanted)
        bound = parameters[1:] if parameters[:1] == ["self"] and not inspect.isclass(thing) else parameters
        method = getattr(thing, name)
        check_call(method, f"{path}.{name}", wanted, *bound)
        if wanted.startswith("async ") and not inspect.iscoroutinefunction(inspect.unwrap(method)):
            raise ConfigError(f"{place_of(method)}{path}.{name} is no coroutine function: write `{wanted}`")


def check_names(found: Sequence[tuple[str, Any]], where: str) -> None:
    """Check that no two things have one name. Raises ``ConfigError`` with the places of both."""
    seen: dict[str, Any] = {}
    for name, thing in found:
        if name in seen:
            places = " and ".join(
                place.removesuffix(": ") or "a built-in one" for place in map(place_of, (seen[name], thing))
            )
            raise ConfigError(f"{where}: there are two named {name!r}, {places}: give one of them another name")
        seen[name] = thing


def extras_of(function: Callable[..., Any], offered: Sequence[str]) -> tuple[str, ...]:
    """Of the names that are offered, those that a function has a parameter for."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return ()
    return tuple(name for name in offered if name in parameters)


def _parameters(line: str) -> list[str]:
    """Names of the parameters in a line such as ``def step(self, action: str) -> StepResult``."""
    inside = line.partition("(")[2].partition(")")[0]
    return [part.partition(":")[0].strip() for part in inside.split(",") if part.strip()]


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
    module_name, name = _parts(path)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise _not_found(path, module_name, error) from error
    except RAISED as error:  # the user's code runs here, and can raise anything
        raise _failed(path, module_name, error) from error
    target: Any = module
    for part in name.split("."):
        if not hasattr(target, part):
            file = getattr(module, "__file__", None)
            raise _lacks(f"{file}: " if file else "", path, part, vars(module))
        target = getattr(target, part)
    return target


def check_can_be_loaded(path: str) -> None:
    """Check that ``load_object`` would find ``package.module:name``, without running any of its code.

    For a process that must not import the module's dependencies, such as torch. A module without Python source is taken
    to have the name.

    Raises:
        ConfigError: as ``load_object``.
    """
    module_name, name = _parts(path)
    package, *parts = module_name.split(".")
    spec = find_spec(package)  # of a name with dots it would import the packages
    for part in (package, *parts):
        if part is not package:
            spec = PathFinder.find_spec(part, list(spec.submodule_search_locations or ())) if spec else None
        if spec is None:
            raise ConfigError(f"{path}: there is no module {part!r}; {_where_looked()}{_hidden(module_name)}")
    assert spec is not None
    if spec.origin is None or not spec.origin.endswith(".py"):
        return
    try:
        source = decode_source(Path(spec.origin).read_bytes())
        symbols = symtable.symtable(source, spec.origin, "exec").get_symbols()
    except SyntaxError as error:
        raise ConfigError(f"{spec.origin}:{error.lineno or 1}: {path} cannot be read: {error.msg}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {spec.origin} cannot be read: {error}") from error
    names = sorted(symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported())
    first = name.split(".")[0]
    if first not in names and "import *" not in source:
        raise _lacks(f"{spec.origin}: ", path, first, names)


def _parts(path: str) -> tuple[str, str]:
    """Module and name; makes the module findable: the current directory first, then those of ``look_in``, then installed ones."""
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ConfigError(f"{path!r} is no import path; write it as package.module:name")
    for place in reversed(directories()):
        if place not in sys.path:
            sys.path.insert(0, place)
    return module_name, name


def _lacks(place: str, path: str, part: str, names: Iterable[str]) -> ConfigError:
    module_name = path.partition(":")[0]
    known = ", ".join(name for name in names if not name.startswith("_")) or "no public names"
    return ConfigError(f"{place}{path}: {module_name} has no {part!r}; it has {known}{_hidden(module_name)}")


def _not_found(path: str, module_name: str, error: ModuleNotFoundError) -> ConfigError:
    if error.name is None or f"{module_name}.".startswith(f"{error.name}."):
        return ConfigError(f"{path}: there is no module {error.name!r}; {_where_looked()}{_hidden(module_name)}")
    if error.name.partition(".")[0] == "services":
        return _failed(path, module_name, error)
    return ConfigError(
        f"{place_of_error(error)}{path}: importing {module_name} needs {error.name!r}, which is not installed"
    )


def _failed(path: str, module_name: str, error: BaseException) -> ConfigError:
    text = told(error)
    if isinstance(error, ImportError) and (inside := error.name or "").partition(".")[0] == "services":
        text += f". Import public names from `rollmill` (import rollmill; docs/reference){_hidden(inside)}"
    return ConfigError(f"{place_of_error(error)}{path}: importing {module_name} failed: {text}")


def _where_looked() -> str:
    others = "".join(f" or {place}" for place in _directories)
    return f"is it spelt right, and is the current directory ({os.getcwd()}){others} the one that holds it?"


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
