"""Names that a judged program may use without an import, and the depth that it may recurse to, as graders of programs
give them: the names of common modules, and nodes of lists and trees.

Put into the program's module before its source, so no line of the source moves; and before test code.
"""

from __future__ import annotations

import builtins
import os
import re
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

from . import plain

# of two equal names the later module's is taken; names of the interpreter keep their meaning
STAR = ("typing", "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics",
        "itertools", "functools", "operator", "io", "sys", "json")  # fmt: skip
_RECURSION = 600_000
# with them a program may use a name that its code does not show
_BY_TEXT = frozenset(("eval", "exec", "globals", "locals", "vars"))
# not imported before a program needs them: both hook into every fork
_READ_AS_TEXT = ("random", "statistics")


def _listed(name: str) -> list[str]:
    if name in _READ_AS_TEXT:
        with open(os.path.join(os.path.dirname(os.__file__), f"{name}.py"), encoding="utf-8") as source:
            return re.findall(r"\w+", source.read().partition("__all__ = [")[2].partition("]")[0])
    module = __import__(name)
    return getattr(module, "__all__", None) or [n for n in vars(module) if not n.startswith("_")]


_MODULE_OF = {name: module for module in STAR for name in _listed(module)}
NAMES = frozenset((*_MODULE_OF, *STAR, "ListNode", "TreeNode")) - vars(builtins).keys()


def prepare(namespace: dict[str, Any], code: types.CodeType) -> None:
    """Supply the names that a program mentions, and let it recurse deeply. Its own definitions then replace them."""
    sys.setrecursionlimit(_RECURSION)
    fill(namespace, NAMES.intersection(_mentioned(code)))


def fill(namespace: dict[str, Any], names: Iterable[str] = NAMES) -> None:
    for name in names:
        if name in STAR:
            namespace[name] = __import__(name)
        else:  # looked up now: a case has streams of its own
            namespace[name] = getattr(__import__(_MODULE_OF[name]) if name in _MODULE_OF else plain, name)


def _mentioned(code: types.CodeType) -> Iterator[str]:
    yield from NAMES if not _BY_TEXT.isdisjoint(code.co_names) else code.co_names
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            yield from _mentioned(part)


def fill_tests(namespace: dict[str, Any], common: bool) -> None:
    """Types with which tests build and compare nodes; the ``common`` names only where they are part of the dialect,
    because names known here are not looked up in the program."""
    if common:
        fill(namespace)
    namespace["list_node"] = plain.build_list
    namespace["tree_node"] = plain.build_tree
    namespace["is_same_list"] = lambda a, b: plain.encode(a) == plain.encode(b)
    namespace["is_same_tree"] = lambda a, b: plain.encode(a) == plain.encode(b)
