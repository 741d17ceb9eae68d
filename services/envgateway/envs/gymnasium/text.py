"""Observations as text, and replies as actions.

Numbers have four significant digits; the parts of a tuple or a mapping stand in lines of their own. Where a drawing marks a
place by colour alone, the marked text is put in brackets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from services.common.errors import ConfigError

_MOST_DIGITS = 18
_MARKED = re.compile(r"\x1b\[[0-9;]+m(.*?)\x1b\[0?m", re.DOTALL)
_CODES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_LINE_OF_COPY = re.compile(r"^\s*(\d{1,6})\s*[:.)]\s*(.*)$", re.MULTILINE)


def text_of(observation: Any) -> str:
    """An observation in plain text.

    >>> text_of({"place": (1, 2), "speed": 0.123456})
    'place: 1, 2\\nspeed: 0.1235'
    """
    if isinstance(observation, Mapping):
        return "\n".join(f"{key}: {_in_line(value)}" for key, value in observation.items())
    if isinstance(observation, (tuple, list)) and any(isinstance(part, (Mapping, tuple, list)) for part in observation):
        return "\n".join(map(text_of, observation))
    return _in_line(observation)


def drawing(rendered: Any) -> str:
    """What ``render`` drew in text.

    >>> drawing("\\x1b[41mS\\x1b[0mFF")
    '[S]FF'
    """
    if not isinstance(rendered, str):
        raise ConfigError(f"the environment draws a {type(rendered).__name__} and no text: write observation: values")
    return _CODES.sub("", _MARKED.sub(r"[\1]", rendered)).strip("\n")


def _in_line(value: Any) -> str:
    if hasattr(value, "tolist"):  # of numpy
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return (" " if isinstance(value, list) else ", ").join(map(_in_line, value))
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


class ActionReader:
    """Finds the action of a discrete space in a reply."""

    def __init__(self, first: int, number: int, names: Sequence[str], where: str) -> None:
        """Actions are the numbers from ``first``. Raises ``ConfigError`` where there are not as many names."""
        if names and len(names) != number:
            raise ConfigError(
                f"{where}.actions has {len(names)} names, and the environment has {number} actions: name each"
            )
        self._first, self._number = first, number
        self._names = {name.strip().lower(): first + place for place, name in enumerate(names)}
        if names:
            longest_first = sorted(map(re.escape, self._names), key=len, reverse=True)
            self._pattern = re.compile(rf"(?<!\w)(?:{'|'.join(longest_first)})(?!\w)")
            self.told = f"one of {', '.join(names)}"
        else:
            self._pattern = re.compile(r"\d+")
            self.told = f"a whole number from {first} to {first + number - 1}"

    def __call__(self, reply: str) -> int | None:
        found = self._pattern.findall(reply.lower())
        if not found:
            return None
        if self._names:
            return self._names[found[-1]]
        # Python refuses to read thousands of digits: so many are no action of a space that counts.
        action = int(found[-1]) if len(found[-1]) <= _MOST_DIGITS else -1
        return action if self._first <= action < self._first + self._number else None


def actions_of_copies(reply: str, copies: Sequence[int], read: Callable[[str], Any]) -> dict[int, Any] | None:
    """The actions in lines ``1: left``, by copy from 0, of the copies that still play; None where one lacks.

    >>> actions_of_copies("1: up\\n3: down", [0, 2], str.strip)
    {0: 'up', 2: 'down'}
    """
    found = {int(number) - 1: read(rest) for number, rest in _LINE_OF_COPY.findall(reply)}
    chosen = {copy: found.get(copy) for copy in copies}
    return None if any(action is None for action in chosen.values()) else chosen
