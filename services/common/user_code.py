"""Locates code of the user, and gives the correction where its signature does not fit.

Every message begins with ``FILE:LINE``, where Python knows them.
"""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from services.common.errors import ConfigError

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
