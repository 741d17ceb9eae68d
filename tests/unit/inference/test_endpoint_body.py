"""The body of a request is read into its fields and its items, exactly."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import InvalidRequestError
from services.inference.endpoint.server import read_body

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
members = st.dictionaries(st.text(max_size=6).filter(lambda name: name != "messages"), json_values, max_size=3)


@given(before=members, items=st.lists(json_values, max_size=3), after=members)
def test_fields_and_items_are_those_of_the_object(
    before: dict[str, Any], items: list[Any], after: dict[str, Any]
) -> None:
    whole = {**before, "messages": items, **after}
    fields, read = read_body(json.dumps(whole).encode(), "messages")
    assert {**fields, "messages": list(read)} == whole


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{", "{}", '{"messages": 3}', '{"messages": [}', '{"messages": [1 2]}', '{"messages": []} x',
        '{"messages": [], "messages": []}', '{"a": , "messages": []}', '{1: 2, "messages": []}', '{"messages": []', '{"messages": ["\\ud800"]}',
        '{"messages": [' + "[" * 100_000,
    ],
)  # fmt: skip
def test_what_is_no_object_with_messages_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError):
        read_body(text.encode(), "messages")


def test_a_body_that_is_no_utf_8_is_refused() -> None:
    with pytest.raises(InvalidRequestError):
        read_body(b'{"messages": ["\xff"]}', "messages")


def test_a_text_in_place_of_the_items_is_one_item() -> None:
    assert read_body(b'{"a": 1, "input": "hello", "b": 2}', "input") == ({"a": 1, "b": 2}, ["hello"])
