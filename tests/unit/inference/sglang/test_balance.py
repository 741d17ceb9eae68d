"""Where requests go."""

from __future__ import annotations

from typing import Any

from services.inference.engine.served.fleet import PrefixMap


def test_a_conversation_is_found_by_its_longest_known_beginning() -> None:
    prefixes: Any = PrefixMap()  # of any servers
    first = list(range(200))
    prefixes.note(first, 0)
    prefixes.note([*range(64), *range(500, 700)], 1)
    assert prefixes.find([*first, *range(900, 990)]) == 0
    assert prefixes.find([*range(64), *range(500, 900)]) == 1
    assert prefixes.find(list(range(1000, 1200))) is None
    prefixes.forget(0)
    assert prefixes.find([*first, 7]) == 1  # only the first block is known


def test_short_prompts_are_known_by_themselves() -> None:
    prefixes: Any = PrefixMap()  # of any servers
    prefixes.note([1, 2, 3], 2)
    assert prefixes.find([1, 2, 3]) == 2
    assert prefixes.find([1, 2, 4]) is None
