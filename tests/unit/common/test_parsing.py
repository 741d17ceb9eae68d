"""Threads that parse Python at the same time."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from services.common.text.programs import defined_by, names_of


def _let_others_run(_phase: str, _facts: dict[str, int]) -> None:
    time.sleep(0)


@pytest.fixture
def switches() -> Iterator[None]:
    """Threads change places in the middle of the making of a tree: the sweeper runs then, and calls a function."""
    threshold = gc.get_threshold()
    gc.set_threshold(10)
    gc.callbacks.append(_let_others_run)
    yield
    gc.callbacks.remove(_let_others_run)
    gc.set_threshold(*threshold)


def _read(number: int) -> tuple[str, tuple[str, ...]]:
    tests = "\n".join(f"assert g([[{i}, {{'a': ({number}, -{i})}}]]) == {i}" for i in range(20))
    program = f"def g(x):\n    return [[x + {number} * 2]]\nprint(g(int(input())))"
    return names_of(tests, "g").entry_point, defined_by(program, tests)


@pytest.mark.usefixtures("switches")
def test_threads_that_parse_at_once_get_the_trees_of_one_thread() -> None:
    with ThreadPoolExecutor(8) as threads:
        told = list(threads.map(_read, range(64)))
    assert told == [("g", ("g",))] * 64
