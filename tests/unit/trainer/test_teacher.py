"""On-policy distillation in the training step, and which teachers are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from services.common.errors import ModelMismatchError
from services.trainer.app import build_step
from services.trainer.metrics import Sums
from services.trainer.model.micro_batches import MicroBatch, forward
from services.trainer.ranks import Ranks
from services.trainer.step import TrainStep
from tests.unit.trainer.building import algorithm, rank_batch, tiny_causal_lm, train_step, training_sequences
from tests.unit.trainer_service.building import recipe, save_model


def distilled(name: str = "reinforce", **settings: Any) -> Any:
    return algorithm(name, distillation={"teacher_model": "the-teacher", **settings})


def packed(step: TrainStep, count: int = 8) -> list[MicroBatch]:
    return [m for part in step._pack(rank_batch(training_sequences(count)), Sums(torch.device("cpu"))) for m in part]


def test_the_teachers_log_probabilities_are_those_of_its_own_forward_pass_at_the_sampling_temperature() -> None:
    teacher = tiny_causal_lm(seed=1)
    step = train_step(distilled(), teacher=tiny_causal_lm(seed=1), temperature=0.7, max_tokens=4096)
    (batch,) = packed(step)
    expected = []
    for item in sorted(training_sequences(8), key=lambda s: -s.sequence.num_tokens):
        ids = torch.as_tensor(item.sequence.token_ids, dtype=torch.int64)
        with torch.no_grad():
            log_p = (teacher(input_ids=ids[None]).logits[0] / 0.7).log_softmax(-1)
        start = 0
        for segment in item.sequence.segments:
            own = range(start, start + segment.num_tokens)
            expected += [float(log_p[t - 1, ids[t]]) for t in own] if segment.is_policy else []
            start += segment.num_tokens
    assert batch.teacher is not None
    assert batch.teacher.tolist() == pytest.approx(expected, abs=1e-5)


def test_the_behaviour_policy_as_student_is_compared_as_it_was_recorded() -> None:
    """By a plain loss: the gradient is that of -(teacher - b) l per trained token."""
    step = train_step(distilled(student="behaviour", coefficient=0.5), teacher=tiny_causal_lm(seed=1))
    plain = train_step(algorithm("reinforce"))
    total = torch.zeros(())
    batches = packed(step)
    for batch in batches:
        assert batch.teacher is not None
        total = total - (0.5 * (batch.teacher - batch.behaviour) * forward(plain.model, batch, 1.0)[0]).sum()
    (total / sum(len(b.behaviour) for b in batches)).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in plain.model.parameters() if p.grad is not None])
    metrics = step.run(rank_batch(training_sequences(8)))
    assert metrics.grad_norm == pytest.approx(float(norm), rel=1e-4)
    gaps = torch.cat([b.behaviour - b.teacher for b in batches if b.teacher is not None])
    assert metrics.algorithm["distillation_kl"] == pytest.approx(float(gaps.mean()), rel=1e-5)
    assert metrics.advantage_abs_mean == pytest.approx(0.5 * float(gaps.abs().mean()), rel=1e-5)


def taught(model: Path, teacher: Path) -> Any:
    return recipe(
        model,
        algorithm={"name": "reinforce", "distillation": {"teacher_model": str(teacher)}},
        batch={"dynamic_sampling": False},
    )


def test_a_recipe_loads_its_teacher_beside_the_policy(tmp_path: Path) -> None:
    student, teacher = save_model(tmp_path / "student"), save_model(tmp_path / "teacher", seed=1)
    run = taught(student, teacher)
    step, _ = build_step(run, "model0", str(student), Ranks.single())
    assert step.run(rank_batch(training_sequences(8))).algorithm["distillation_kl"] != 0.0
    assert not any(p.requires_grad for p in step.teacher.parameters())  # type: ignore[union-attr]


def test_a_teacher_with_another_vocabulary_is_refused_with_the_tokens_that_differ(tmp_path: Path) -> None:
    student, teacher = save_model(tmp_path / "student"), save_model(tmp_path / "teacher", vocabulary=29)
    with pytest.raises(ModelMismatchError) as caught:
        build_step(taught(student, teacher), "model0", str(student), Ranks.single())
    assert f"the teacher {teacher}: 31 tokens here, 29 there, 2 differ" in caught.value.message
    assert "'w16' is 29 here and missing there" in caught.value.message
