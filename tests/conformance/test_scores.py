"""Scores of a student's tokens by a teacher's engine."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from services.common.errors import InvalidRequestError, PromptTooLongError
from services.common.weights.snapshot import named_weights
from services.inference.engine.base import ScoreRequest, WeightUpdate
from tests.conformance.subjects import CONTEXT, Subject
from tests.random_models import TOLERANCE, VOCAB, make_prompt, make_request, reference_logprobs

pytestmark = pytest.mark.asyncio(loop_scope="session")

# The recipe refuses a served teacher on SGLang.
SCORING = pytest.mark.parametrize("subject", ["torch-qwen3", "forced-qwen3", "scripted"], indirect=True)
EXACT = pytest.mark.parametrize("exact", ["torch-qwen3", "torch-qwen2", "torch-llama", "forced-qwen3"], indirect=True)


def make_score_request(
    tokens: list[int], positions: list[int], temperatures: float | list[float] = 1.0
) -> ScoreRequest:
    return ScoreRequest(
        request_id="score",
        token_ids=np.asarray(tokens, dtype=np.int32),
        positions=np.asarray(positions, dtype=np.int64),
        temperatures=np.broadcast_to(np.asarray(temperatures, dtype=np.float32), len(positions)).copy(),
    )


def expected(model: Any, request: ScoreRequest) -> np.ndarray:
    tokens = request.token_ids.tolist()
    at = {float(t): reference_logprobs(model, tokens, 1, temperature=float(t)) for t in set(request.temperatures)}
    found = [
        at[float(temperature)][position - 1, tokens[position]]
        for position, temperature in zip(request.positions.tolist(), request.temperatures, strict=True)
    ]
    return np.array([float(value) for value in found])


@EXACT
async def test_scores_equal_a_forward_pass_at_each_tokens_temperature(exact: Subject) -> None:
    cases = [
        make_score_request(make_prompt(2), [1]),
        make_score_request(make_prompt(40, 1), list(range(7, 40)), 0.7),
        make_score_request(make_prompt(90, 2), [3, 4, 50, 51, 89], [1.0, 0.5, 1.3, 2.0, 0.7]),
        make_score_request(make_prompt(CONTEXT, 3), list(range(1, CONTEXT))),  # more than have logits at once
    ]
    found = await asyncio.gather(*map(exact.engine.score, cases))
    for request, scores in zip(cases, found, strict=True):
        assert scores.dtype == np.float32
        assert np.abs(scores - expected(exact.model, request)).max() <= TOLERANCE


@EXACT
async def test_scores_are_of_the_weights_that_are_held(exact: Subject) -> None:
    request = make_score_request(make_prompt(30), list(range(5, 30)))
    before = await exact.engine.score(request)
    later = exact.next_model()
    await exact.engine.update(WeightUpdate.full(named_weights(later), 1))
    after = await exact.engine.score(request)
    assert np.abs(after - before).max() > 0.01
    assert np.abs(after - expected(later, request)).max() <= TOLERANCE


@SCORING
async def test_scoring_changes_nothing_of_what_is_generated(subject: Subject) -> None:
    request = make_prompt(20, 6)
    alone = await subject.engine.generate(make_request(request, seed=3, max_new_tokens=30))
    generating = asyncio.ensure_future(subject.engine.generate(make_request(request, seed=3, max_new_tokens=30)))
    for _ in range(5):
        await subject.engine.score(make_score_request(make_prompt(60, 1), [20, 40]))
    assert (await generating).token_ids == alone.token_ids


@SCORING
@pytest.mark.parametrize(
    ("tokens", "positions", "temperature", "error"),
    [
        (make_prompt(CONTEXT + 1), [1], 1.0, PromptTooLongError),
        (make_prompt(10), [0], 1.0, InvalidRequestError),
        (make_prompt(10), [10], 1.0, InvalidRequestError),
        (make_prompt(10), [5], 0.0, InvalidRequestError),
    ],
)
async def test_what_cannot_be_scored_is_refused(
    subject: Subject, tokens: list[int], positions: list[int], temperature: float, error: type[Exception]
) -> None:
    with pytest.raises(error):
        await subject.engine.score(make_score_request(tokens, positions, temperature))
    assert (await subject.engine.score(make_score_request([], []))).shape == (0,)


@EXACT
async def test_tokens_that_the_model_lacks_are_refused(exact: Subject) -> None:
    with pytest.raises(InvalidRequestError, match=f"outside 0…{VOCAB - 1}"):
        await exact.engine.score(make_score_request([1, 2, VOCAB], [1]))
