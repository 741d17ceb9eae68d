r"""The answer of a scripted policy to a task of a dataset: the reference, or a wrong answer.

A row with ``tests`` wants a program, one with ``answer`` a ``\boxed{}`` (or the bare answer: ``written``), and one with only
a ``solution`` that text.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from services.common.errors import DatasetError
from services.common.importing import load_object
from services.inference.scripts.base import Cue
from services.inference.scripts.programs import broken_program, fenced, right_program
from services.inference.scripts.words import reasoning


def answer(cue: Cue, *, right: bool, topic: str = "") -> str:
    """The whole of a turn that answers the task. ``DatasetError`` for a row without anything to compare with."""
    row = cue.task.data
    if isinstance(row.get("tests"), Mapping):
        program = right_program(row) if right else None
        program = broken_program(cue.random(f"program/{topic}")) if program is None else program
        return reasoning(cue, topic) + fenced(program)
    if "answer" in row:
        return reasoning(cue, topic) + written(cue, value(cue, right=right, topic=topic))
    if isinstance(row.get("solution"), str):
        return str(row["solution"]) if right else broken_program(cue.random(f"program/{topic}"))
    raise DatasetError(
        f"task {cue.task.task_id} has no reference for a scripted policy: looked for tests, answer and solution in "
        f"{sorted(row)}; name a script of your own in inference.<name>.forced.script"
    )


def value(cue: Cue, *, right: bool, topic: str = "") -> str:
    """The row's answer, or another one of its kind."""
    truth = str(cue.task.data["answer"]).strip()
    return truth if right else wrong_value(truth, cue.random(f"value/{topic}").randrange(1, 10))


def wrong_value(truth: str, step: int) -> str:
    """A wrong answer: a whole number ``step`` higher, else a large whole number that is no answer of a task.

    >>> wrong_value("12", 3), wrong_value("\\\\frac{1}{2}", 3)
    ('15', '90000003')
    """
    try:
        return str(int(truth) + step)
    except ValueError:
        return str(90_000_000 + step)


def written(cue: Cue, text: str) -> str:
    """A value in a box; the bare value where the recipe's own reward function gives the answer in a box less than the bare
    one."""
    path = str(getattr(cue.settings, "reward", ""))
    return text if ":" in path and _prefers_bare(path, cue.task.data) else boxed(text)


_bare: dict[str, bool] = {}  # by import path of a reward function


def _prefers_bare(path: str, row: Mapping[str, Any]) -> bool:
    if path not in _bare:
        function, truth = load_object(path), str(row["answer"]).strip()
        try:
            is_async = inspect.iscoroutinefunction(function)
            _bare[path] = not is_async and bool(function(row, truth) > function(row, boxed(truth)))
        except Exception:  # noqa: BLE001 - the user's code may raise any error; the rollout's own call reports the error
            _bare[path] = False
    return _bare[path]


def boxed(text: str) -> str:
    return rf"\boxed{{{text}}}"


def is_right(row: Mapping[str, Any], text: str) -> bool:
    """Whether a text that a script wrote gives the reference answer."""
    if isinstance(row.get("tests"), Mapping):
        program = right_program(row)
        return program is not None and fenced(program) in text
    if "answer" in row:
        truth = str(row["answer"]).strip()
        return boxed(truth) in text or text == truth
    return text == row.get("solution")


def speak(cue: Cue) -> str:
    """The script of ``single_turn``: the reference answer, or a wrong one."""
    return answer(cue, right=cue.is_right())
