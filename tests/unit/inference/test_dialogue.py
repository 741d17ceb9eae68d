"""Workflows of users: ends of a dialogue, and its record."""

from __future__ import annotations

import pytest

from services.common.config.data import WorkflowConfig
from services.common.records import StopReason, Task
from services.inference.workflows.base import Outcome, WorkflowContext
from services.inference.workflows.registry import build_workflow
from services.inference.workflows.single import Dialogue, Workflow, WorkflowSettings
from tests.unit.inference.fakes import FakeGateway, make_context, make_task, qwen_like_chat, replies, served_policy


class Twice(Workflow):
    """Asks once more after any answer."""

    async def run(self, task: Task, context: WorkflowContext) -> Outcome:
        chat = self.converse(task, context, role="solver", attempt=1)
        await chat.respond()
        if chat.say("Again."):
            await chat.respond()
        return chat.outcome(await chat.grade(), turns=len(chat.turns))


NAME = f"{__name__}:Twice"


async def begun(texts: list[str], *, context_length: int = 2048) -> tuple[Dialogue, FakeGateway]:
    policy = await served_policy(replies(qwen_like_chat(), texts), context_length=context_length)
    gateway = FakeGateway()
    return Twice(WorkflowSettings()).converse(make_task(), make_context(policy, gateway)), gateway


async def test_a_workflow_of_a_few_lines_is_a_whole_rollout() -> None:
    policy = await served_policy(["first", "second"])
    gateway = FakeGateway(reward=lambda task, text: float(text == "second"))
    outcome = await build_workflow(WorkflowConfig(name=NAME)).run(make_task(), make_context(policy, gateway))
    (sequence,) = outcome.sequences
    assert (outcome.reward, outcome.metrics) == (1.0, {"turns": 2.0})
    assert (sequence.role, sequence.attempt, sequence.stop_reason) == ("solver", 1, StopReason.STOP)
    assert gateway.graded == [("math", "second")]
    assert [segment.is_policy for segment in sequence.segments] == [False, True, False, True]


async def test_a_message_without_an_answer_is_no_part_of_the_record() -> None:
    chat, _ = await begun(["first"])
    await chat.respond()
    assert chat.say("Again.")
    sequence = chat.sequence(0.0)
    assert sequence.stop_reason is StopReason.TURN_LIMIT and sequence.segments[-1].is_policy
    assert chat.sequence(0.0, StopReason.STOP).stop_reason is StopReason.STOP


async def test_a_turn_that_was_cut_short_cannot_be_answered() -> None:
    chat, _ = await begun(["word " * 2000])
    await chat.respond()
    assert not chat.say("Again.")
    sequence = chat.sequence(0.0)
    assert (sequence.stop_reason, sequence.metrics["truncated"]) == (StopReason.LENGTH, 1.0)


async def test_a_message_that_does_not_fit_ends_the_dialogue() -> None:
    chat, _ = await begun(["first"], context_length=80)
    await chat.respond()
    assert not chat.say("word " * 100)
    assert chat.sequence(0.0).stop_reason is StopReason.LENGTH


def test_settings_of_another_class_are_refused_where_they_are_written() -> None:
    with pytest.raises(
        TypeError, match=rf"{__file__}:\d+: Bad.Settings: write `class Settings\(rollmill.WorkflowSettings\)`"
    ):

        class Bad(Workflow):
            class Settings:
                pass
