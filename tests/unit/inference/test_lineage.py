"""Where a conversation of an agent comes from, by its messages alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from services.common.records import Origin
from services.common.text.chat import Message
from services.inference.endpoint.forms import tool_result
from services.inference.workflows.agents import Answer, Call, TurnMark, lineage_of

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
