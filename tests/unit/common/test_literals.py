"""Literals of test code, from their syntax alone."""

from __future__ import annotations

import ast
import math
from typing import Any

import pytest

from services.common.text.literals import NotLiteralError, to_tree, tree_of


def _tree(text: str) -> Any:
    return tree_of(ast.parse(text, mode="eval").body)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3 * 19", 57),
        ("[1, -2.5, (3,), {4}, {'a': None}]", [1, -2.5, (3,), {4}, {"a": None}]),
        ("'ab' + 'c'", "abc"),
        ("0 ** 0", 1),
        ("float('inf')", math.inf),
        ("tuple([1, 2])", (1, 2)),
        ("set()", set()),
        ("str(3 + 4)", "7"),
        ("sorted([3, 1])", [1, 3]),
        ("sorted({3, 1, 3})", [1, 3]),
        ("sorted(set([2, 1, 1]))", [1, 2]),
        ("copy.deepcopy([1])", [1]),
    ],
)
def test_literals_are_read_from_their_text(text: str, value: Any) -> None:
    assert _tree(text) == to_tree(value)


def test_nodes_are_read_from_their_values() -> None:
    assert _tree("list_node([1, 2])") == ["L", 1, 2] and _tree("list_node([])") is None
    assert _tree("tree_node([1, None, 2, None])") == ["T", 1, None, 2]


@pytest.mark.parametrize(
    "text",
    [
        "f(1)", "x", "10 ** 10 ** 10", "9 ** 99", "[x for x in y]", "1 / 0", "'a' * 9", "{**x}", "...", "2 << 9",
        "sorted([1, 'a'])", "sorted([True, False])", "sorted([1.5, 2])", "str([1])", "str(1.0)", "str(True)",
        "list({1, 2})", "tuple(set([1, 1]))", "{'a': list(frozenset([1]))}", "list_node({1})",
    ],
)  # fmt: skip
def test_only_small_literals_are_accepted(text: str) -> None:
    with pytest.raises(NotLiteralError):
        _tree(text)
