"""Lists the tasks of a verifiers environment as rows of a dataset, and finds the interpreter of its process.

A row names its environment, so that the replica which plays it needs no other setting:

    {"id": "0", "verifiers": {"environment": "wordle", "arguments": {}}, "task": {"idx": 0, "prompt": ...}}
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import services
from extras.hub.verifiers.child.messages import Failed, FailureKind
from services.common.config.data import DatasetConfig
from services.common.errors import ConfigError, DatasetError
from services.common.importing import directories
from services.common.system.child import bound_to_this_process
from services.common.system.processes import AnsweringChild, ChildLostError

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


OPEN_TIMEOUT_S = 300.0  # loading an environment may fetch its data set
_TASKS_TIMEOUT_S = 300.0
_TASKS_AT_ONCE = 256


def rows(config: DatasetConfig, seed: int) -> Iterator[dict[str, Any]]:
    """The first ``config.limit`` tasks, or all.

    Raises:
        DatasetError: the environment is not installed, cannot be loaded, or has no end and there is no limit.
    """
    name, limit = config.verifiers or "", config.limit
    where = f"verifiers environment {name!r}"
    named = {"environment": name, "arguments": dict(config.settings)}
    start = 0
    try:
        child = AnsweringChild(where, command(), variables=variables(), own_group=True)
    except (ConfigError, ChildLostError) as error:
        raise DatasetError(f"{where}: {error.message}") from None
    try:
        answer = child.ask(f"loading {where}", OPEN_TIMEOUT_S, {"ask": "open", **named})
        if _content(answer, "opened", where, name)["endless"] and limit is None:
            raise DatasetError(f"{where} has endless tasks: set `limit`")
        while limit is None or start < limit:
            count = _TASKS_AT_ONCE if limit is None else min(_TASKS_AT_ONCE, limit - start)
            question = {"ask": "tasks", "start": start, "count": count}
            answer = child.ask(f"the tasks of {where}", _TASKS_TIMEOUT_S, question)
            tasks = _content(answer, "tasks", where, name)
            for task in tasks:
                yield {"id": str(task.get("id", task.get("idx"))), "verifiers": named, "task": task}
            if len(tasks) < count:
                return
            start += count
    except ChildLostError as error:
        raise DatasetError(f"{where}: {error.message}") from None
    finally:
        child.close()


def _content(answer: Mapping[str, Any], key: str, where: str, environment: str) -> Any:
    if key in answer:
        return answer[key]
    raise DatasetError(f"{where}: {explained(Failed(**answer['failed']), environment)}")


def explained(failed: Failed, environment: str) -> str:
    """A failure to open, with the remedy."""
    if FailureKind(failed.kind) is FailureKind.NOT_INSTALLED:
        if "'verifiers'" in failed.message:
            return f"{interpreter()} has no package verifiers: run `{INSTALL}`"
        return (
            f"{failed.message} It is not installed: run `{interpreter()} -m pip install PACKAGE` with the package or the folder "
            f"of {environment.rsplit('/', 1)[-1]}"
        )
    return failed.message
