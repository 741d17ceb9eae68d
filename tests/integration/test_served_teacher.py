"""A teacher that is served and one that the trainer holds: one number for each token, and one gradient."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from services.common.errors import InvalidRequestError
from services.common.records import Segment, StopReason, TokenSequence, TrainingSequence
from services.inference.engine.torch.engine import TorchEngine
from services.inference.rollouts import score_request
from services.trainer.metrics import Sums
from services.trainer.step import TrainStep
from tests.integration.test_truncated_sampling import as_trained
from tests.random_models import build_model, make_prompt, make_request
from tests.unit.trainer.building import algorithm, path_of, rank_batch, train_step

SERVED = {"teacher": "teacher"}
HELD = {"teacher_model": "the same weights"}


async def played(student: Any, teacher: Any, temperature: float, count: int = 8) -> list[TrainingSequence]:
    """Two turns of a student at different temperatures, scored by the engine of a teacher, as they reach the trainer."""
    engines = [TorchEngine(copy.deepcopy(model), num_slots=4, context_length=256) for model in (student, teacher)]
    for engine in engines:
        await engine.start()
    try:
        items = []
        for i in range(count):
            prompt = make_prompt(9, i)
            first = await engines[0].generate(
                make_request(prompt, seed=i, max_new_tokens=20 + i, temperature=temperature)
            )
            result = make_prompt(5, i + 50)
            read = [*prompt, *first.token_ids, *result]
            second = await engines[0].generate(make_request(read, seed=i, max_new_tokens=15, temperature=0.6))
            own = tuple(replace(segment, temperature=0.6) for segment in second.segments)
            sequence = TokenSequence(
                policy="student",
                segments=(Segment.environment(prompt), *first.segments, Segment.environment(result), *own),
                reward=float(i % 2),
                stop_reason=StopReason.LENGTH,
            )
            scores = await engines[1].score(score_request(sequence, temperature, "r"))
            items.append(as_trained(with_scores(sequence, scores), i, count))
        return items
    finally:
        for engine in engines:
            await engine.stop()


def with_scores(sequence: TokenSequence, scores: np.ndarray) -> TokenSequence:
    segments, start = [], 0
    for segment in sequence.segments:
        own = scores[start : start + segment.num_tokens] if segment.is_policy else scores[:0]
        start += len(own)
        segments.append(replace(segment, teacher_logprobs=own))
    return replace(sequence, segments=tuple(segments))


def step_of(
    student: Any, teacher: Any, temperature: float, settings: dict[str, Any], max_tokens: int = 97
) -> TrainStep:
    return train_step(
        algorithm("ppo_clip", distillation={**settings, "task_coefficient": 0.3}),
        causal_lm=copy.deepcopy(student),
        teacher=None if settings is SERVED else copy.deepcopy(teacher),
        temperature=temperature,
        max_tokens=max_tokens,
    )


def teacher_said(step: TrainStep, items: list[TrainingSequence]) -> dict[tuple[int, ...], list[float]]:
    """By the tokens of a document: the teacher's log-probabilities in the step."""
    found = {}
    for batch in (b for part in step._pack(rank_batch(items), Sums(torch.device("cpu"))) for b in part):
        assert batch.teacher is not None
        predecessors, last_ids = (batch.targets.each(t) for t in (batch.targets.predecessors, batch.targets.token_ids))
        for index in range(batch.num_sequences):
            own = batch.sequence_index == index
            path = path_of(batch.documents.branches, int(predecessors[own][-1]))
            found[(*batch.token_ids[path].tolist(), int(last_ids[own][-1]))] = batch.teacher[own].tolist()
    return found


@pytest.mark.parametrize("temperature", [1.0, 0.8])
async def test_served_scores_are_the_trainers_own_forward_pass_of_the_same_weights(temperature: float) -> None:
    student, teacher = build_model("qwen3"), build_model("qwen3", seed=5)
    items = await played(student, teacher, temperature)
    served = teacher_said(step_of(student, teacher, temperature, SERVED), items)
    held = teacher_said(step_of(student, teacher, temperature, HELD), items)
    assert served.keys() == held.keys() and len(served) == 8
    for tokens, scores in served.items():
        assert np.abs(np.array(scores) - np.array(held[tokens])).max() <= 1e-4
    one = step_of(student, teacher, temperature, SERVED).run(rank_batch(items))
    two = step_of(student, teacher, temperature, HELD).run(rank_batch(items))
    assert one.grad_norm == pytest.approx(two.grad_norm, rel=1e-4) and one.grad_norm > 0
    assert one.algorithm["distillation_kl"] == pytest.approx(two.algorithm["distillation_kl"], abs=1e-4)
    assert one.algorithm["distillation_kl"] > 0.1


async def test_the_gradient_does_not_depend_on_packing() -> None:
    student, teacher = build_model("qwen2"), build_model("qwen2", seed=5)
    items = await played(student, teacher, 1.0)
    norms = [
        step_of(student, teacher, 1.0, SERVED, budget).run(rank_batch(items)).grad_norm for budget in (60, 200, 9999)
    ]
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-5)


async def test_a_sequence_without_scores_is_not_trained_on_the_task_alone() -> None:
    student, teacher = build_model("qwen3"), build_model("qwen3", seed=5)
    items = await played(student, teacher, 1.0, count=2)
    whole = items[0].sequence
    bare = replace(whole, segments=tuple(replace(s, teacher_logprobs=s.teacher_logprobs[:0]) for s in whole.segments))
    part = replace(whole, segments=(*whole.segments[:-1], bare.segments[-1]))
    for broken in (bare, part):
        with pytest.raises(InvalidRequestError, match=r"sequence g/0/0.*lack"):
            step_of(student, teacher, 1.0, SERVED).run(rank_batch([replace(items[0], sequence=broken), items[1]]))
