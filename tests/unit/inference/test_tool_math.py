"""Tool-calling math: the reward depends on the answer, the penalty on failed calls and format."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from services.common.errors import PromptTooLongError
from services.common.records import Purpose, StopReason, TokenSequence
from services.inference.workflows.base import Execution, ProgramStatus
from services.inference.workflows.tools import ToolMath, ToolMathSettings, format_term
from tests.unit.inference.fakes import (
    FakeGateway,
    RecordingEngine,
    make_context,
    make_task,
    qwen_like_chat,
    served_policy,
)

ANSWER = "<answer>\\boxed{42}</answer>"
PROGRAMS = {
    "print(6*7)": Execution(status=ProgramStatus.OK, stdout="42\n"),
    "print('Error')": Execution(status=ProgramStatus.OK, stdout="Error: only a word\n"),
    "spin": Execution(status=ProgramStatus.TIME_LIMIT),
}


def call(code: str) -> str:
    arguments = {"code": code, "input": ""}
    return f"<tool_call>{json.dumps({'name': 'python_code_with_standard_io', 'arguments': arguments})}</tool_call>"


async def play(texts: list[str], purpose: Purpose = Purpose.TRAIN, **settings: Any) -> TokenSequence:
    policy = await served_policy(texts, context_length=8192)
    context = dataclasses.replace(make_context(policy, FakeGateway(PROGRAMS)), purpose=purpose)
    outcome = await ToolMath(ToolMathSettings(**settings)).run(make_task(), context)
    return outcome.sequences[0]


@pytest.mark.parametrize(
    ("texts", "errors", "shape"),
    [
        ([ANSWER], 0.5, 0.0),
        ([call("print(6*7)"), ANSWER], 0.0, 0.0),
        ([call("spin"), call("print(6*7)"), ANSWER], 0.5, 0.0),
        ([call("print('Error')"), ANSWER], 0.0, 0.0),  # the status decides, not the word
        (["<tool_call>{</tool_call>", ANSWER], 1.0, 0.0),
        (["\\boxed{42}"], 0.5, 1.0),
        (["<answer>\\boxed{42}"], 0.5, 1.0),
        ([call("print(6*7)") + ANSWER, ANSWER], 0.0, 0.5),
    ],
)
async def test_the_penalty_counts_failed_calls_and_a_missing_or_repeated_answer(
    texts: list[str], errors: float, shape: float
) -> None:
    sequence = await play(texts)
    assert sequence.metrics["tool_error_share"] == errors and sequence.metrics["format_penalty"] == shape
    assert sequence.metrics["penalty"] == errors + shape


@pytest.mark.parametrize(
    ("turns", "term"),
    [
        ([ANSWER], 0.0),
        ([""], 1.0),
        ([ANSWER * 2], 1.0),
        (["", ANSWER * 2], 0.5),
        ([ANSWER * 9], 1.0),
        ([ANSWER + "<answer>"], 1.0),
        (["</answer>42<answer>"], 1.0),
        (["<answer><answer>42</answer></answer>"], 1.0),
        (["<answer>\n42\n</answer>"], 0.0),
    ],
)
def test_format_term(turns: list[str], term: float) -> None:
    assert format_term(turns, "answer") == term


async def test_every_turn_is_begun_with_the_prefill_which_is_not_trained_nor_graded() -> None:
    graded: list[str] = []

    def grade(task: Any, completion: str) -> float:
        graded.append(completion)
        return 1.0

    texts = [f"compute</reason>{call('print(6*7)')}", f"so 42</reason>{ANSWER}"]
    policy = await served_policy(texts, context_length=8192)
    context = make_context(policy, FakeGateway(PROGRAMS, reward=grade))
    (sequence,) = (await ToolMath(ToolMathSettings()).run(make_task(), context)).sequences
    chat = qwen_like_chat()
    shown = [(s.is_policy, chat.decode(s.token_ids.tolist())) for s in sequence.segments]
    assert [is_policy for is_policy, _ in shown] == [False, True, False, True]
    invitation = "<|im_start|>assistant\n<reason>"
    assert all(text.endswith(invitation) for is_policy, text in shown if not is_policy)
    assert [text for is_policy, text in shown if is_policy] == texts and graded == texts[-1:]
    # The engine's prompt is the sequence up to there, token by token.
    assert isinstance(policy.engine, RecordingEngine)
    ids = list(sequence.token_ids)
    for request, end in zip(policy.engine.requests, (1, 3), strict=True):
        asked = list(request.prompt_ids)
        assert asked == ids[: len(asked)] and len(asked) == sum(s.num_tokens for s in sequence.segments[:end])


async def test_a_prefill_counts_as_prompt_and_can_be_left_out() -> None:
    begun, plain = await play([ANSWER]), await play([ANSWER], assistant_prefill="")
    chat = qwen_like_chat()
    prompts = [chat.decode(s.segments[0].token_ids.tolist()) for s in (begun, plain)]
    assert prompts[0] == prompts[1] + "<reason>"
    with pytest.raises(PromptTooLongError):
        await play([ANSWER], max_prompt_tokens=begun.segments[0].num_tokens - 1)


async def test_evaluation_has_a_budget_of_its_own() -> None:
    texts = [call("print(6*7)")] * 4 + [ANSWER]
    training = await play(texts, max_response_tokens=150, evaluation_max_response_tokens=4000)
    evaluation = await play(texts, Purpose.EVALUATION, max_response_tokens=150, evaluation_max_response_tokens=4000)
    assert training.stop_reason is StopReason.LENGTH and evaluation.stop_reason is StopReason.STOP
