"""A body is read the short way or in full with the same outcome."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import InvalidRequestError
from services.inference.endpoint.body import read_body

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
members = st.dictionaries(st.text(max_size=6).filter(lambda name: name != "messages"), json_values, max_size=3)
objects = st.dictionaries(st.text(max_size=4), json_values, max_size=3)


def dump(before: dict[str, Any], messages: list[Any], after: dict[str, Any], indent: int | None) -> str:
    later = {name: value for name, value in after.items() if name not in before}
    return json.dumps({**before, "messages": messages, **later}, indent=indent)


@given(
    before=members,
    after=members,
    old=st.lists(objects, min_size=1, max_size=3),
    new=st.lists(objects, max_size=3),
    data=st.data(),
)
def test_the_short_way_gives_what_the_full_one_gives(
    before: dict[str, Any], after: dict[str, Any], old: list[Any], new: list[Any], data: st.DataObject
) -> None:
    indent = data.draw(st.sampled_from([None, 2]))
    first = read_body(dump(before, old, after, indent), "messages")
    assert list(first.items) == old and first.head is not None
    text = dump(before, old + new, after, indent)
    full = read_body(text, "messages")
    assert full.known is None
    assert {**full.fields, "messages": list(full.items)} == json.loads(text)
    short = read_body(text, "messages", [first.head])
    assert short.known is first.head
    assert list(short.items) == new
    assert short.fields == full.fields
    assert short.head is not None and full.head is not None
    assert short.head.text == full.head.text


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{", "{}", '{"messages": 3}', '{"messages": [}', '{"messages": [1 2]}', '{"messages": []} x',
        '{"messages": [], "messages": []}', '{"a": , "messages": []}', '{1: 2, "messages": []}', '{"messages": []',
        '{"messages": [' + "[" * 100_000,
    ],
)  # fmt: skip
def test_what_is_no_object_with_messages_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError):
        read_body(text, "messages")


def test_a_head_that_ends_within_a_longer_text_is_not_taken_for_its_own() -> None:
    head = read_body('{"messages": [{"role": "user", "content": "a"}]}', "messages").head
    assert head is not None
    other = read_body('{"messages": [{"role": "user", "content": "ab"}]}', "messages", [head])
    assert other.known is None
    assert other.items == ({"role": "user", "content": "ab"},)


def test_a_text_in_place_of_the_items_is_one_item_and_begins_no_later_body() -> None:
    read = read_body('{"a": 1, "input": "hello", "b": 2}', "input")
    assert (read.items, read.fields, read.head) == (("hello",), {"a": 1, "b": 2}, None)


def test_a_head_of_another_list_is_not_taken() -> None:
    head = read_body('{"input": [1], "messages": 2}', "input").head
    assert head is not None
    read = read_body('{"input": [1], "messages": [2]}', "messages", [head])
    assert (read.items, read.known, read.fields) == ((2,), None, {"input": [1]})
