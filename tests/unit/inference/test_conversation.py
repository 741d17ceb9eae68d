"""Token-in, token-out: a conversation records exactly the engine's prompts and samples."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.config.data import WorkflowConfig
from services.common.errors import PromptTooLongError
from services.common.records import Sampling, StopReason, Task
from services.common.telemetry.accounts import TimeAccount
from services.inference.engine.base import GenerationRequest
from services.inference.rollouts import RolloutPolicy
from services.inference.workflows.base import Conversation, Outcome, WorkflowContext
from services.inference.workflows.registry import build_workflow
from services.inference.workflows.single import Dialogue, Workflow, WorkflowSettings
from tests.unit.inference.fakes import (
    FakeGateway,
    RecordingEngine,
    make_context,
    make_task,
    qwen_like_chat,
    replies,
    served_policy,
)

QUESTION = [{"role": "user", "content": "go"}]


async def begin(
    script: object, *, sampling: Sampling | None = None, context_length: int = 2048, **limits: Any
) -> tuple[Conversation, RecordingEngine]:
    policy = await served_policy(script, context_length=context_length)  # type: ignore[arg-type]
    assert isinstance(policy.engine, RecordingEngine)
    client = RolloutPolicy(policy, request_prefix="g/0/0", seed=3, account=TimeAccount("replica/a"))
    return Conversation(client, QUESTION, sampling or Sampling(max_new_tokens=300), **limits), policy.engine


@settings(max_examples=25)
@given(
    turns=st.lists(st.lists(st.integers(0, 400), min_size=1, max_size=20), min_size=1, max_size=4),
    answers=st.lists(st.text(max_size=20), min_size=3, max_size=3),
)
def test_segments_are_exactly_prompt_sampled_and_environment_tokens(turns: list[list[int]], answers: list[str]) -> None:
    """Any sampled ids, such as ones that no text tokenises to, are recorded and continued unchanged."""
    chat = qwen_like_chat()
    stop = chat.end_of_turn_id

    def script(request: GenerationRequest) -> Sequence[int]:
        said = turns[int(request.request_id.rsplit("/", 1)[1])]
        return [*(t for t in said if t != stop), stop]

    async def play() -> tuple[Conversation, RecordingEngine]:
        conversation, engine = await begin(script)
        for turn in range(len(turns)):
            await conversation.generate()
            if turn < len(turns) - 1:
                assert conversation.add({"role": "tool", "content": answers[turn]})
        return conversation, engine

    conversation, engine = asyncio.run(play())
    expected = list(chat.prompt_ids(QUESTION))
    for turn, (request, generation) in enumerate(zip(engine.requests, engine.generations, strict=True)):
        assert list(request.prompt_ids) == expected
        expected += generation.token_ids
        if turn < len(turns) - 1:
            expected += chat.continuation_ids([{"role": "tool", "content": answers[turn]}], last_sampled=stop)
    sequence = conversation.sequence(reward=1.0, stop_reason=StopReason.STOP)
    assert sequence.token_ids.tolist() == expected
    trained = [int(t) for s in sequence.segments if s.is_policy for t in s.token_ids]
    assert trained == [t for g in engine.generations for t in g.token_ids]
    logprobs = np.concatenate([s.logprobs for s in sequence.segments if s.is_policy])
    assert np.array_equal(logprobs, np.concatenate([s.logprobs for g in engine.generations for s in g.segments]))


@pytest.mark.parametrize("limits", [{"context_length": 10}, {"max_prompt_tokens": 10}])
async def test_a_prompt_that_does_not_fit_is_refused(limits: dict[str, int]) -> None:
    with pytest.raises(PromptTooLongError, match=r"at most (9|10)"):
        await begin(["x"], **limits)


async def test_a_turn_never_asks_for_more_than_is_left() -> None:
    prompt = len(qwen_like_chat().prompt_ids(QUESTION))
    conversation, engine = await begin(["a" * 500], context_length=prompt + 30, sampling=Sampling(max_new_tokens=100))
    turn = await conversation.generate()
    assert engine.requests[0].sampling.max_new_tokens == 30
    assert not turn.ended
    assert len(conversation.token_ids) == prompt + turn.num_tokens <= prompt + 30


async def test_an_answer_after_which_no_token_would_fit_is_not_added() -> None:
    conversation, _ = await begin(["call"], max_response_tokens=40)
    await conversation.generate()
    before = conversation.token_ids
    assert not conversation.add({"role": "tool", "content": "long " * 40})
    assert conversation.token_ids == before
    assert conversation.add({"role": "tool", "content": "4"})


async def test_the_text_of_a_turn_has_the_tag_of_a_thought_that_the_template_begins() -> None:
    for said in ("so</think> 3", "<think>so</think> 3"):
        conversation, _ = await begin([said], assistant_prefill="<think>\n")
        assert (await conversation.generate()).text == "<think>so</think> 3"
    conversation, _ = await begin(["so</think> 3"])
    assert (await conversation.generate()).text == "so</think> 3"


# -- Workflows of users: ends of a dialogue, and its record.


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
