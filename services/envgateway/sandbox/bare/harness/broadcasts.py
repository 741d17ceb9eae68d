"""Comparisons of numpy in which an empty array is unequal to other values.

An empty array compared with a number, or with an array of one row, is broadcast to an empty array, and ``all`` of an
empty array is true: ``np.allclose([], 5)``, ``(answer == 5).all()``. In the tests' interpreter, two sides of which only
one is empty are unequal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def refuse_empty(uses_numpy: bool) -> None:
    """Patch comparisons in this process, for arrays of answers; with ``uses_numpy`` also ``allclose``, ``isclose`` and
    ``numpy.testing``."""
    global _refuses
    _refuses = True
    if not uses_numpy:
        return
    import numpy
    import numpy.testing as testing

    numpy.allclose = _unequal(numpy.allclose, lambda: False)
    numpy.isclose = _unequal(numpy.isclose, lambda: numpy.bool_(False))
    for name in (
        "assert_allclose",
        "assert_array_equal",
        "assert_array_almost_equal",
        "assert_equal",
        "assert_almost_equal",
    ):
        setattr(testing, name, _unequal(getattr(testing, name), _fail))


def is_lost(left: Any, right: Any) -> bool:
    """Whether exactly one side has no values."""
    import numpy

    try:
        return (numpy.size(left) == 0) is not (numpy.size(right) == 0)
    except ValueError:  # a ragged list: not for us to say
        return False


def empty(array: Any) -> Any:
    """An empty array that equals only empty arrays; unchanged in a program's process."""
    return array.view(empty_type()) if _refuses else array


def _unequal(function: Callable[..., Any], otherwise: Callable[[], Any]) -> Callable[..., Any]:
    def compare(*sides: Any, **named: Any) -> Any:
        return otherwise() if len(sides) > 1 and is_lost(*sides[:2]) else function(*sides, **named)

    return compare


def _fail() -> Any:
    raise AssertionError("one side has no values")


def empty_type() -> Any:
    """A type that is called like its base."""
    import numpy

    global _Empty
    if _Empty is None:

        class Empty(numpy.ndarray):
            def __eq__(self, other: object) -> Any:
                return numpy.bool_(False) if is_lost(self, other) else numpy.asarray(self) == numpy.asarray(other)

            def __ne__(self, other: object) -> Any:
                return numpy.bool_(True) if is_lost(self, other) else numpy.asarray(self) != numpy.asarray(other)

        Empty.__name__, Empty.__module__ = "ndarray", "numpy"
        _Empty = Empty
    return _Empty


_Empty: Any = None
_refuses = False
