"""Thought and text of an answer while it grows: never more than the whole answer has, and in the end all of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.inference.endpoint.dialects import split_growing
from services.inference.endpoint.forms import (
    read_chat,
    read_input,
    read_messages,
)
from services.inference.workflows.agents import (
    Call,
    apart_message,
    plain_arguments,
    read_answer,
    same_message,
    split_thought,
)

pieces = st.lists(st.sampled_from(["<think>", "</think>", "<", "thi", "a", " ", "\n", "b c"]), max_size=8).map("".join)


@given(text=pieces, thinks=st.booleans())
def test_what_was_sent_of_a_growing_answer_begins_the_whole_answer(text: str, thinks: bool) -> None:
    thought, said = split_thought(text, thinks=thinks)
    before = ("", "")
    for end in range(len(text) + 1):
        now = split_growing(text[:end], thinks=thinks)
        assert thought.startswith(now[0]) and said.startswith(now[1])
        assert now[0].startswith(before[0]) and now[1].startswith(before[1])
        assert not now[1] or now[0] == thought, "text follows the whole thought"
        before = now


words = st.text(st.characters(exclude_characters="<>", exclude_categories=["Cs"]), max_size=12).map(str.strip)
calls = st.builds(Call, id=words, name=words, arguments=st.sampled_from(["{}", '{"a":1}', '{"b":[1,"x"]}']))


@given(thought=words, said=words, made=st.lists(calls, max_size=2), keeps=st.booleans())
def test_an_answer_that_a_client_returns_is_the_answer_in_every_dialect(
    thought: str, said: str, made: list[Call], keeps: bool
) -> None:
    text = f"<think>\n{thought}\n</think>\n\n{said}" if thought else said
    ours = {**read_answer(text, with_calls=False, thinks=False).message()}
    if made:
        told = [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in made]
        ours["tool_calls"] = told

    def functions() -> list[dict[str, Any]]:
        return [{"id": c.id, "function": {"name": c.name, "arguments": f" {c.arguments} "}} for c in made]

    returned = {
        "chat": read_chat([{"role": "assistant", "content": f"{text} ", "tool_calls": functions()}]),
        "responses": read_input(
            [
                *([{"type": "reasoning", "content": [{"type": "reasoning_text", "text": thought}]}] if keeps and thought else []),
                {"role": "assistant", "content": [{"type": "output_text", "text": said}]},
                *({"type": "function_call", "call_id": c.id, "name": c.name, "arguments": c.arguments} for c in made),
            ],
        ),
        "messages": read_messages(
            [
                {
                    "role": "assistant",
                    "content": [
                        *([{"type": "thinking", "thinking": thought, "signature": "x"}] if keeps and thought else []),
                        {"type": "text", "text": said},
                        *({"type": "tool_use", "id": c.id, "name": c.name, "input": json.loads(c.arguments)} for c in made),
                    ],
                }
            ],
        ),
    }  # fmt: skip
    for dialect, (theirs,) in returned.items():
        assert same_message(ours, theirs), dialect
        assert not same_message(
            ours, {**theirs, "content": theirs["content"] + "x", **({"said": said + "x"} if "said" in theirs else {})}
        )


def test_a_thought_that_a_client_changed_is_another_history() -> None:
    ours = read_answer("<think>a</think>b", with_calls=False, thinks=False).message()
    assert same_message(ours, apart_message("b", None)) and same_message(ours, apart_message("b", "a"))
    assert not same_message(ours, apart_message("b", "c"))


def test_results_between_texts_keep_their_places() -> None:
    blocks = [
        {"type": "text", "text": "before"},
        {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "one"}]},
        {"type": "tool_result", "tool_use_id": "2"},
        {"type": "text", "text": "a"},
        {"type": "text", "text": "b"},
    ]
    read = read_messages([{"role": "user", "content": blocks}])
    assert [(m["role"], m["content"]) for m in read] == [
        ("user", "before"), ("tool", "one"), ("tool", ""), ("user", "a\nb"),
    ]  # fmt: skip


CALL = '<tool_call>{"name": "add", "parameters": {"a": 1}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "thinks", "said", "num_calls"),
    [
        (f"<think>I could write {CALL} but no.</think> The answer is 3.", False, "The answer is 3.", 0),
        (f"I could write {CALL} but no.</think> The answer is 3.", True, "The answer is 3.", 0),
        (f"<think>no {CALL}</think> yes {CALL}", False, "yes", 1),
        (f"no {CALL}</think>{CALL}{CALL}", True, "", 2),
        (f"it never ends {CALL}", True, "", 0),
    ],
)
def test_a_call_that_a_thought_mentions_is_none(text: str, thinks: bool, said: str, num_calls: int) -> None:
    answer = read_answer(text, with_calls=True, thinks=thinks)
    assert (answer.said, [call.arguments for call in answer.calls]) == (said, ['{"a":1}'] * num_calls)


def test_a_call_keeps_integers_of_any_size() -> None:
    number = 10**30
    said = f'<tool_call>{{"id": "x", "name": "f", "arguments": {{"a": {number}}}}}</tool_call>'
    answer = read_answer(said, with_calls=True, thinks=False)
    assert [call.arguments for call in answer.calls] == [f'{{"a":{number}}}'] == [plain_arguments(f'{{"a": {number}}}')]
