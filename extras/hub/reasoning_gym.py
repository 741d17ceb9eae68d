"""Tasks of the package reasoning-gym: rows by name, and the score that their dataset gives an answer.

A row carries the arguments of its dataset and its place there, so the grader makes the task again instead of reading the
task from the row: data of a score function need not survive JSON. Imports the package when called.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from services.common.config.data import DatasetConfig
from services.common.errors import DatasetError
from services.common.installing import install
from services.common.text.thoughts import after_thoughts

MISSING = f"the package reasoning-gym is not installed here: {install('reasoning-gym')}"
DEFAULT_SIZE = 500  # the package's own
_MAX_DATASETS = 16


def rows(config: DatasetConfig, seed: int) -> Iterator[dict[str, Any]]:
    """Rows ``{"question", "answer", "reasoning_gym"}``. Equal arguments give equal rows.

    Raises:
        DatasetError: the package is missing, there is no such task (with near names), or it refuses the settings.
    """
    name = config.reasoning_gym or ""
    # A seed far from those of other seeds. The package's tasks are drawn from ``seed + index``: with the seeds 0 and 1 two
    # datasets would share all rows but one.
    spread = int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=4).digest(), "big") >> 1
    arguments = {"seed": spread, "size": config.size or DEFAULT_SIZE, **config.settings}
    dataset = open_dataset(name, arguments)
    for index in range(len(dataset)):
        entry = dataset[index]
        reference = {"name": name, "arguments": arguments, "index": index}
        yield {"question": entry["question"], "answer": entry["answer"], "reasoning_gym": reference}


def open_dataset(name: str, arguments: Mapping[str, Any]) -> Any:
    """The package's dataset. Raises ``DatasetError`` as ``rows``."""
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ModuleNotFoundError as error:
        raise DatasetError(MISSING) from error
    import reasoning_gym  # noqa: F401 - registers the tasks

    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=3, cutoff=0.5)
        hint = (
            f"did you mean {' or '.join(map(repr, near))}?" if near else f"there are {len(DATASETS)}, such as chain_sum"
        )
        raise DatasetError(f"reasoning-gym has no task {name!r}: {hint}")
    known = [field.name for field in dataclasses.fields(DATASETS[name][1])]
    for key in arguments:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "write one of them"
            raise DatasetError(f"settings.{key}: {name} of reasoning-gym has {', '.join(known)}: {hint}")
    try:
        return create_dataset(name, **arguments)
    except (AssertionError, TypeError, ValueError) as error:
        raise DatasetError(f"{name} of reasoning-gym refuses its settings {dict(arguments)}: {error}") from error


def load_scorer() -> Callable[[bytes, bytes], tuple[str, str] | tuple[str, str, float]]:
    """The grader of a worker (``rewards/math_worker.py``): scores an answer to the task that a row's column refers to."""
    from services.envgateway.calls import RewardResult

    with contextlib.suppress(ModuleNotFoundError):  # told with the first row
        import reasoning_gym  # noqa: F401 - takes seconds, which are not an answer's
    opened = functools.lru_cache(_MAX_DATASETS)(lambda name, arguments: open_dataset(name, json.loads(arguments)))

    def grade(truth: bytes, completion: bytes) -> tuple[str, str] | tuple[str, str, float]:
        reference = json.loads(truth)
        try:
            dataset = opened(reference["name"], json.dumps(reference["arguments"], sort_keys=True))
        except DatasetError as error:
            return "grader_failed", error.message
        entry = dataset[reference["index"]]
        if entry["question"] != reference["question"]:
            return (
                "grader_failed",
                "reasoning-gym makes another task here than where the row was made: install one version",
            )
        try:
            score = float(dataset.score_answer(answer_in(completion.decode(errors="replace")), entry))
        except (MemoryError, RecursionError):
            raise
        except Exception as error:  # noqa: BLE001 - a score function may raise anything on untrusted text
            return "wrong", f"{type(error).__name__}: {error}"
        if not math.isfinite(score):
            return "grader_failed", f"the score function of {reference['name']} returned {score}"
        return RewardResult.of(score).outcome.value, "", score

    return grade


def answer_in(completion: str) -> str:
    """The text to score: between the last answer tags, else everything after the thoughts.

    >>> answer_in("It is <answer> 7 </answer>"), answer_in(" 7 ")
    ('7', '7')
    """
    said = after_thoughts(completion)
    _, opened, rest = said.rpartition("<answer>")
    content, closed, _ = rest.partition("</answer>")
    return (content if opened and closed else said).strip()
