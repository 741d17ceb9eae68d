"""Thought and text of an answer while it grows: never more than the whole answer has, and in the end all of it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.kept_tokens import left_out_row, pack, unpack
from services.common.records import Origin, Segment
from services.common.text.chat import Message
from services.inference.endpoint.dialects import split_growing
from services.inference.endpoint.forms import (
    read_chat,
    read_input,
    read_messages,
    tool_result,
)
from services.inference.engine.base import FinishReason, Generation
from services.inference.workflows.agents import (
    Answer,
    Call,
    StopWatch,
    TurnMark,
    apart_message,
    lineage_of,
    plain_arguments,
    read_answer,
    same_message,
    settled,
    split_thought,
)
from tests.unit.inference.fakes import qwen_like_chat

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


# -- Stop texts, and text that grows by tokens.


def said(ids: list[int], cut: int) -> Generation:
    """Ids of two versions, cut anywhere."""
    parts = [(ids[:cut], 3), (ids[cut:], 4)]
    return Generation(
        segments=tuple(
            Segment.policy(
                part,
                [-0.1 * (i + 1) for i in range(len(part))],
                version,
                kept=pack([left_out_row([token + 1]) for token in part], len(part)),
            )
            for part, version in parts
            if part
        ),
        finish_reason=FinishReason.LENGTH,
    )


@given(
    text=st.text(max_size=40), stop=st.text(min_size=1, max_size=3), told=st.integers(0, 200), cut=st.integers(0, 40)
)
def test_a_generation_ends_with_the_token_that_completes_a_stop(text: str, stop: str, told: int, cut: int) -> None:
    """For any number of tokens that the engine reported before its end."""
    chat = qwen_like_chat()
    ids = list(chat.encode(text))
    watch = StopWatch(chat, [stop])
    for token in ids[:told]:
        if watch.on_sampled(token):
            break
    whole = said(ids, min(cut, len(ids)))
    kept = watch.finish(whole)
    tokens = kept.token_ids
    assert tokens == ids[: len(tokens)]
    if stop in chat.decode(ids):
        assert kept.finish_reason is FinishReason.STOP
        assert stop in chat.decode(tokens) and stop not in chat.decode(tokens[:-1])
        assert watch.stop_in(chat.decode(tokens)) == stop
    else:
        assert kept is whole
    wanted, got = ([(s.weight_version, float(p)) for s in g.segments for p in s.logprobs] for g in (whole, kept))
    assert got == wanted[: len(got)] and len(got) == len(tokens)
    sets = [unpack(s.kept, s.token_ids) for s in kept.segments]
    assert [int(i) for s in sets for i in s.ids] == [token + 1 for token in tokens]


@given(text=st.text("ab<", max_size=20), ending=st.text("ab<", min_size=1, max_size=4), more=st.text("ab<", max_size=9))
def test_settled_text_stays_whatever_comes(text: str, ending: str, more: str) -> None:
    now = settled(text, [ending])
    assert ending not in now
    assert (text + more).partition(ending)[0].startswith(now)


# -- Where a conversation of an agent comes from, by its messages alone.


SYSTEM: Message = {"role": "system", "content": "You lead."}
GO: Message = {"role": "user", "content": "Write the report."}
SUMMARY = "The report has two of its three parts."
BRIEF = "Find the boiling point of ethanol."


def says(text: str, **arguments: str) -> Message:
    calls = tuple(Call(id=f"id-{name}", name=name, arguments=f'{{"x":"{value}"}}') for name, value in arguments.items())
    return Answer(content=text, said=text, calls=calls).message()


@dataclass
class Played:
    """A conversation; every assistant message is a turn of the policy."""

    messages: list[Message]
    tools_key: bytes = b""
    parent: Any = None
    marks: list[TurnMark] = field(default_factory=list)

    def __post_init__(self) -> None:
        turns = [i + 1 for i, message in enumerate(self.messages) if message["role"] == "assistant"]
        self.marks = [TurnMark(num_messages=end, num_segments=2 * n + 2) for n, end in enumerate(turns)]


LEAD = Played([SYSTEM, GO, says("I begin."), GO, says("I ask for help.", ask=BRIEF)])
DONE = Played([SYSTEM, GO, says(SUMMARY)])
ALONE = [{"role": "user", "content": "Something else."}]


@pytest.mark.parametrize(
    ("messages", "threads", "origin", "parent"),
    [
        (ALONE, [], Origin.ROOT, None),
        (ALONE, [DONE], Origin.ROOT, None),
        ([SYSTEM, GO], [DONE], Origin.ROOT, None),  # the same prompt again: neither comes from the other
        ([*DONE.messages, GO], [DONE], Origin.BRANCH, DONE),
        ([*LEAD.messages[:3], *ALONE], [DONE, LEAD], Origin.BRANCH, LEAD),
        ([SYSTEM, {"role": "user", "content": f"So far: {SUMMARY} Go on."}], [DONE], Origin.COMPACTION, DONE),
        (
            [SYSTEM, GO, says("I ask for help.", ask=BRIEF), tool_result("id-ask", "78")],
            [LEAD],
            Origin.COMPACTION,
            LEAD,
        ),
        ([SYSTEM, GO, tool_result("id-ask", "78")], [LEAD], Origin.COMPACTION, LEAD),
        ([{"role": "user", "content": f"Judge this: {SUMMARY}"}], [DONE], Origin.SUBAGENT, DONE),
        ([{"role": "user", "content": BRIEF}], [DONE, LEAD], Origin.SUBAGENT, LEAD),
        (ALONE, [LEAD], Origin.SUBAGENT, LEAD),
    ],
)
def test_a_conversation_has_the_parent_that_its_messages_show(
    messages: list[Message], threads: list[Played], origin: Origin, parent: Played | None
) -> None:
    found = lineage_of(messages, b"", threads)
    assert (found.origin, found.parent) == (origin, parent)


def test_other_tools_under_the_same_history_are_a_branch_and_short_answers_are_no_quotes() -> None:
    assert lineage_of([*DONE.messages, GO], b"tools", [DONE]).origin is Origin.BRANCH
    short = Played([SYSTEM, GO, says("Yes.")])
    assert lineage_of([SYSTEM, {"role": "user", "content": "Yes. Go on."}], b"", [short]).origin is Origin.ROOT
