"""Python literals as trees of plain data, from their syntax alone: only small arithmetic is evaluated.

The sandbox's harness has the form of the trees (``services.envgateway.sandbox.bare.plain``).

Test code writes values as ``3 * 19``, ``list_node([1, 2])`` or ``float("inf")``; these are understood, too. An
expression that could be large or slow is refused rather than bounded.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

_SMALL = 1 << 53
_LARGEST_OPERAND = 1e15
_LARGEST_POWER = 64
_FLOATS = ("inf", "-inf", "+inf", "infinity", "nan")
_OPERATIONS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_CONVERSIONS = {"tuple": "t", "list": "l", "set": "s", "frozenset": "z"}
_NODES = {"list_node": "L", "tree_node": "T"}


class NotLiteralError(ValueError):
    """The text of the expression does not give its value."""


def to_tree(value: Any) -> Any:
    """The tree of a value of ours. Raises ``ValueError`` for other than plain data."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return value if -_SMALL < value < _SMALL else ["i", hex(value)]
    if isinstance(value, float):
        return ["f", value.hex()]
    if isinstance(value, complex):
        return ["c", value.real.hex(), value.imag.hex()]
    if isinstance(value, bytes):
        return ["b", value.hex()]
    if isinstance(value, dict):
        return ["d", *(to_tree(part) for pair in value.items() for part in pair)]
    for kind, tag in ((list, "l"), (tuple, "t"), (set, "s"), (frozenset, "z")):
        if isinstance(value, kind):
            return [tag, *map(to_tree, value)]
    raise ValueError(f"a {type(value).__name__} is no plain data")


def tree_of(node: ast.expr) -> Any:
    """The tree of a literal expression.

    Raises:
        NotLiteralError: the expression is not a literal.
    """
    match node:
        case ast.Constant(value=value) if value is not Ellipsis:
            return to_tree(value)
        case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
            return [_CONVERSIONS[type(node).__name__.lower()], *map(tree_of, items)]
        case ast.Dict(keys=keys, values=values) if None not in keys:
            return ["d", *(tree_of(part) for pair in zip(keys, values, strict=True) for part in pair if part)]
        case ast.UnaryOp() | ast.BinOp() | ast.Name():
            return to_tree(_number(node))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
            return _call(name, arguments)
        case ast.Call(func=ast.Attribute(value=ast.Name(id="copy"), attr="deepcopy"), args=[argument], keywords=[]):
            return tree_of(argument)
    raise NotLiteralError(f"not a literal: {ast.unparse(node)[:100]}")


def _number(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int() | float() | complex() | str() as value) if not isinstance(value, bool):
            return value
        case ast.Name(id="inf"):
            return float("inf")
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
            if not isinstance(value := _number(operand), str):
                return -value if isinstance(sign, ast.USub) else value
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATIONS:
            return _result(_OPERATIONS[type(sign)], _number(left), _number(right))
    raise NotLiteralError(f"not a number: {ast.unparse(node)[:100]}")


def _result(operation: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    if isinstance(left, str) or isinstance(right, str):
        if isinstance(left, str) and isinstance(right, str) and operation is operator.add:
            return left + right
        raise NotLiteralError("arithmetic with a text")
    if abs(left) > _LARGEST_OPERAND or abs(right) > _LARGEST_OPERAND:
        raise NotLiteralError("arithmetic with large numbers")
    if operation is operator.pow and (abs(right) > _LARGEST_POWER or abs(left) > _LARGEST_OPERAND**0.5):
        raise NotLiteralError("a large power")
    try:
        return operation(left, right)
    except (ArithmeticError, TypeError) as error:
        raise NotLiteralError(f"arithmetic that fails: {error}") from None


def _call(name: str, arguments: list[ast.expr]) -> Any:
    match arguments:
        case [ast.Constant(value=str() as text)] if name == "float" and text.strip().lower() in _FLOATS:
            return to_tree(float(text))
        case [argument] if name in _NODES or name in _CONVERSIONS:
            tree = tree_of(argument)
            if isinstance(tree, list) and tree[0] in ("l", "t", "s", "z")[: 4 if name in ("set", "frozenset") else 2]:
                return _node(name, tree[1:]) if name in _NODES else [_CONVERSIONS[name], *tree[1:]]
        case [argument] if name == "str" and type(number := tree_of(argument)) in (int, str):
            return str(number)
        case [argument] if name == "sorted":
            tree = tree_of(argument)
            parts = tree[1:] if isinstance(tree, list) and tree[0] in ("l", "t", "s", "z") else [None]
            if {type(part) for part in parts} in ({int}, {str}):
                return ["l", *sorted(parts if tree[0] in ("l", "t") else set(parts))]
        case [argument] if name == "deepcopy":
            return tree_of(argument)
        case [] if name in _CONVERSIONS or name == "dict":
            return [_CONVERSIONS.get(name, "d")]
    raise NotLiteralError(f"not a literal: {name}(...)")


def _node(name: str, values: list[Any]) -> Any:
    """No node at all is None; a tree is written without missing nodes at its end."""
    if name == "tree_node":
        while values and values[-1] is None:
            values = values[:-1]
    return [_NODES[name], *values] if values else None
