"""Objects named by import path in a recipe: ``package.module:name``."""

from __future__ import annotations

import importlib
import os
import sys
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
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a user's module lies beside the recipe, not in site-packages
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
