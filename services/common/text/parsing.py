"""``ast.parse`` for threads: CPython 3.11 counts the depth of a tree for the whole process, so that two threads that build trees
at once raise SystemError ("AST constructor recursion depth mismatch")."""

from __future__ import annotations

import ast
import threading

PARSING = threading.Lock()  # for code that calls ``ast.parse`` itself


def parsed_module(text: str) -> ast.Module:
    """The syntax tree of a module, one thread at a time. Raises what ``ast.parse`` raises."""
    with PARSING:
        return ast.parse(text)


def parsed_expression(text: str | bytes) -> ast.expr:
    """The syntax tree of one expression, one thread at a time. Raises what ``ast.parse`` raises."""
    with PARSING:
        return ast.parse(text, mode="eval").body
