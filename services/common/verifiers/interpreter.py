"""Finds the interpreter that has ``verifiers``, and the command line of an environment's process."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import services
from services.common.errors import ConfigError
from services.common.importing import directories
from services.common.system.child import bound_to_this_process

PYTHON = "ROLLMILL_VERIFIERS_PYTHON"
FOLDER = ".venv-verifiers"
INSTALL = "make install-verifiers"
_REPOSITORY = Path(services.__file__).resolve().parents[1]
_PROGRAM = Path(__file__).parent / "child" / "main.py"


def interpreter(environment: Mapping[str, str] = os.environ) -> str:
    """The variable's interpreter, that of ``.venv-verifiers`` in the current directory or beside the sources, or our own.

    Raises:
        ConfigError: none of them is there; with the command that makes one.
    """
    named = environment.get(PYTHON)
    if named is not None:
        if shutil.which(named) is None:
            raise ConfigError(
                f"{PYTHON}: there is no interpreter {named}; name the one of the environment that holds verifiers"
            )
        return named
    for place in (Path.cwd(), _REPOSITORY):
        beside = place / FOLDER / "bin" / "python"
        if beside.exists():
            return str(beside)
    if importlib.util.find_spec("verifiers") is not None:
        return sys.executable
    raise ConfigError(
        f"the package verifiers is not installed: run `{INSTALL}`, which makes {FOLDER}, or name the interpreter of an "
        f"environment that holds it in {PYTHON}"
    )


def variables() -> dict[str, str]:
    """Variables of an environment's process: it finds modules where Rollmill finds those of the user."""
    given = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([*directories(), *([given] if given else [])])}


def command() -> list[str]:
    """The command line of an environment's process, which ends with this one. Raises ``ConfigError``."""
    return bound_to_this_process([interpreter(), str(_PROGRAM)])
