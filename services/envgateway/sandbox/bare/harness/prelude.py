"""Names that call-style problems use without a definition: common imports, and nodes of lists and trees.

Executed into the program's module before its source, only for methods of ``Solution``; and before test code.
"""

from __future__ import annotations

import types
from typing import Any

from . import plain

STAR = ("typing", "functools", "collections", "itertools", "heapq", "bisect", "string", "operator", "math")
_WHOLE = ("random", "functools", "collections", "string", "math", "datetime", "itertools", "heapq", "bisect", "re",
          "typing", "operator")  # fmt: skip


def names() -> frozenset[str]:
    """All names that ``fill`` supplies, without importing modules that are not loaded for every program."""
    return frozenset((*_WHOLE, "inf", "pow", "ListNode", "TreeNode")).union(*map(_listed, map(__import__, STAR)))


def _listed(module: types.ModuleType) -> list[str]:
    return getattr(module, "__all__", None) or [n for n in vars(module) if not n.startswith("_")]


def fill(namespace: dict[str, Any]) -> None:
    """Names that the program's own definitions then replace."""
    for name in STAR:
        module = __import__(name)
        namespace.update((n, getattr(module, n)) for n in _listed(module))
    for name in _WHOLE:
        namespace[name] = __import__(name)
    namespace["inf"] = float("inf")
    namespace["pow"] = pow  # math's would hide the built-in with three arguments
    namespace["ListNode"] = plain.ListNode
    namespace["TreeNode"] = plain.TreeNode


def fill_tests(namespace: dict[str, Any], common: bool) -> None:
    """Types with which tests build and compare nodes; the ``common`` names only where they are part of the dialect,
    because names known here are not looked up in the program."""
    if common:
        fill(namespace)
    namespace["list_node"] = plain.build_list
    namespace["tree_node"] = plain.build_tree
    namespace["is_same_list"] = lambda a, b: plain.encode(a) == plain.encode(b)
    namespace["is_same_tree"] = lambda a, b: plain.encode(a) == plain.encode(b)
