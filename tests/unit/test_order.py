"""Files with slow tests come first, in the order of their length, and the order within a file stays."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from tests import order

TESTS = Path(__file__).resolve().parents[1]


@dataclass
class Item:
    nodeid: str
    slow: bool = False

    def get_closest_marker(self, name: str) -> object:
        return name if self.slow and name == "slow" else None


def sorted_ids(*items: Item) -> list[str]:
    found: list[Any] = list(items)
    order.pytest_collection_modifyitems(cast(list[pytest.Item], found))
    return [item.nodeid for item in found]


def test_the_longest_files_come_first_then_slow_ones_then_the_others() -> None:
    second, first = (Item(f"{file}::test_it", slow=True) for file in (order.LONGEST[1], order.LONGEST[0]))
    mixed = [Item("tests/b.py::test_z"), Item("tests/b.py::test_a", slow=True)]
    assert sorted_ids(Item("tests/a.py::test_it"), second, *mixed, first) == [
        first.nodeid,
        second.nodeid,
        "tests/b.py::test_z",
        "tests/b.py::test_a",
        "tests/a.py::test_it",
    ]


def test_files_that_are_named_are_there_and_hold_slow_tests() -> None:
    texts = {file: (TESTS.parent / file).read_text() for file in order.LONGEST}
    assert [file for file, text in texts.items() if "pytest.mark.slow" not in text] == []
    assert len(set(order.LONGEST)) == len(order.LONGEST)


def test_garbage_is_collected_again_when_the_tests_begin() -> None:
    assert gc.isenabled()
