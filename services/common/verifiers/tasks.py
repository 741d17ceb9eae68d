"""Lists the tasks of a verifiers environment as rows of a dataset.

A row names its environment, so that the replica which plays it needs no other setting:

    {"id": "0", "verifiers": {"environment": "wordle", "arguments": {}}, "task": {"idx": 0, "prompt": ...}}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from services.common.errors import ConfigError, DatasetError
from services.common.system.processes import AnsweringChild, ChildLostError
from services.common.verifiers.child.messages import Ask, Failed, FailureKind, Opened, Reply
from services.common.verifiers.interpreter import INSTALL, command, interpreter, variables

ENVIRONMENT_KEY, TASK_KEY = "verifiers", "task"
OPEN_TIMEOUT_S = 300.0  # loading an environment may fetch its data set
_TASKS_TIMEOUT_S = 300.0
_TASKS_AT_ONCE = 256


def rows(environment: str, arguments: Mapping[str, Any], limit: int | None) -> Iterator[dict[str, Any]]:
    """The first ``limit`` tasks, or all.

    Raises:
        DatasetError: the environment is not installed, cannot be loaded, or has no end and there is no limit.
    """
    where = f"verifiers environment {environment!r}"
    try:
        child = AnsweringChild(where, command(), variables=variables(), own_group=True)
    except (ConfigError, ChildLostError) as error:
        raise DatasetError(f"{where}: {error.message}") from None
    try:
        question = {"ask": Ask.OPEN, "environment": environment, "arguments": dict(arguments)}
        answer = child.ask(f"loading {where}", OPEN_TIMEOUT_S, question)
        if Opened(**_content(answer, Reply.OPENED, where, environment)).endless and limit is None:
            raise DatasetError(f"{where} has endless tasks: set `limit`")
        yield from _listed(child, where, environment, arguments, limit)
    except ChildLostError as error:
        raise DatasetError(f"{where}: {error.message}") from None
    finally:
        child.close()


def _listed(
    child: AnsweringChild, where: str, environment: str, arguments: Mapping[str, Any], limit: int | None
) -> Iterator[dict[str, Any]]:
    named = {"environment": environment, "arguments": dict(arguments)}
    start = 0
    while limit is None or start < limit:
        count = _TASKS_AT_ONCE if limit is None else min(_TASKS_AT_ONCE, limit - start)
        answer = child.ask(
            f"the tasks of {where}", _TASKS_TIMEOUT_S, {"ask": Ask.TASKS, "start": start, "count": count}
        )
        tasks = _content(answer, Reply.TASKS, where, environment)
        for task in tasks:
            yield {"id": str(task.get("id", task.get("idx"))), ENVIRONMENT_KEY: named, TASK_KEY: task}
        if len(tasks) < count:
            return
        start += count


def _content(answer: Mapping[str, Any], key: Reply, where: str, environment: str) -> Any:
    if key in answer:
        return answer[key]
    raise DatasetError(f"{where}: {explained(Failed(**answer[Reply.FAILED]), environment)}")


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
