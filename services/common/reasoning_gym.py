"""Tasks of the package reasoning-gym: rows by name, and the score that their dataset gives an answer.

A row carries the arguments of its dataset and its place there, so the scorer makes the task again instead of reading the
task from the row: data of a score function need not survive JSON. Imports the package when called.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

from services.common.errors import DatasetError
from services.common.installing import install
from services.common.text.thoughts import after_thoughts

COLUMN = "reasoning_gym"  # of a row: the arguments of its dataset, and its place there
MISSING = f"the package reasoning-gym is not installed here: {install('reasoning-gym')}"
DEFAULT_SIZE = 500  # the package's own
_MAX_DATASETS = 16


def rows(name: str, size: int | None, seed: int, settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows ``{"question", "answer", "reasoning_gym"}``. Equal arguments give equal rows.

    Raises:
        DatasetError: the package is missing, there is no such task (with near names), or it refuses the settings.
    """
    arguments = {"seed": _spread(seed), "size": size or DEFAULT_SIZE, **settings}
    dataset = open_dataset(name, arguments)
    for index in range(len(dataset)):
        entry = dataset[index]
        yield {
            "question": entry["question"],
            "answer": entry["answer"],
            COLUMN: {"name": name, "arguments": arguments, "index": index},
        }


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


class Scorer:
    """Scores answers; keeps the datasets that it has opened."""

    def __init__(self) -> None:
        self._datasets: OrderedDict[str, Any] = OrderedDict()

    def entry(self, reference: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Dataset and task of a row's column ``reasoning_gym``. Raises ``DatasetError``."""
        key = repr((reference["name"], sorted(reference["arguments"].items(), key=lambda item: item[0])))
        if key not in self._datasets:
            self._datasets[key] = open_dataset(reference["name"], reference["arguments"])
            if len(self._datasets) > _MAX_DATASETS:
                self._datasets.popitem(last=False)
        self._datasets.move_to_end(key)
        dataset = self._datasets[key]
        return dataset, dataset[reference["index"]]


def answer_in(completion: str) -> str:
    """The text to score: between the last answer tags, else everything after the thoughts.

    >>> answer_in("It is <answer> 7 </answer>"), answer_in(" 7 ")
    ('7', '7')
    """
    said = after_thoughts(completion)
    _, opened, rest = said.rpartition("<answer>")
    content, closed, _ = rest.partition("</answer>")
    return (content if opened and closed else said).strip()


def _spread(seed: int) -> int:
    """A seed far from those of other seeds. The package's tasks are drawn from ``seed + index``: with the seeds 0 and 1 two
    datasets would share all rows but one."""
    return int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=4).digest(), "big") >> 1
