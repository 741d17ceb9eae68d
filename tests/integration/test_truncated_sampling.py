"""A torch engine samples with a truncated distribution, and the trainer scores the tokens: one distribution on both
sides."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest
import torch

from services.common.pb import trajectory_pb2
from services.common.records import Segment, StopReason, TokenSequence, TrainingSequence, Trajectory
from services.common.wire import read, write
from services.inference.engine.torch.engine import TorchEngine
from services.orchestrator.journal import entries
from services.trainer import step as step_module
from services.trainer.model.micro_batches import MicroBatch, forward
from tests.random_models import VOCAB, build_model, make_prompt, make_request, perturbed
from tests.unit.trainer.building import algorithm, rank_batch, train_step

STOPS = tuple(range(0, VOCAB, 3))
SAMPLINGS: dict[str, dict[str, Any]] = {
    "whole": {"temperature": 0.8},
    "top_p": {"top_p": 0.7, "temperature": 1.3},
    "top_k": {"top_k": 7, "temperature": 0.7},
    "min_p": {"min_p": 0.08, "temperature": 1.4},
    "min_new_tokens": {"min_new_tokens": 20, "temperature": 0.8},
    "all": {"top_p": 0.9, "top_k": 40, "min_p": 0.01, "min_new_tokens": 12, "temperature": 1.2},
}


async def sampled(model: Any, count: int, **sampling: Any) -> list[TrainingSequence]:
    """Sequences of a torch engine, as they reach the trainer: over the wire, into the journal and back."""
    engine = TorchEngine(copy.deepcopy(model), num_slots=8, context_length=256)
    await engine.start()
    try:
        items = []
        for i in range(count):
            prompt = make_prompt(9, i)
            generation = await engine.generate(
                make_request(prompt, stop=STOPS[: 1 + i % 3], seed=i, max_new_tokens=40, **sampling)
            )
            sequence = TokenSequence(
                policy="actor",
                segments=(Segment.environment(prompt), *generation.segments),
                reward=float(i % 2),
                stop_reason=StopReason.STOP,
            )
            items.append(as_trained(sequence, i, count))
        return items
    finally:
        await engine.stop()


def as_trained(sequence: TokenSequence, position: int, group_size: int) -> TrainingSequence:
    """A sequence in the trainer's form, of a group in which half of the rollouts are right."""
    return TrainingSequence(
        sequence_id=f"g/{position}/0",
        sequence=travelled(sequence),
        group_mean=0.5,
        group_std=0.5,
        group_size=group_size,
        staleness=0,
        minibatch=0,
        position=position,
    )


def travelled(sequence: TokenSequence) -> TokenSequence:
    """The sequence after the wire, the journal and the wire again."""
    trajectory = Trajectory(task_group_id="g", index=0, sequences=(sequence,), reward=0.0)
    sent = trajectory_pb2.Trajectory()
    write(trajectory, sent)
    received = read(Trajectory, sent)
    line = orjson.dumps(entries.to_json(received), option=orjson.OPT_SERIALIZE_NUMPY)
    recovered = entries.from_json(Trajectory, orjson.loads(line)).sequences[0]
    again = trajectory_pb2.Sequence()
    write(recovered, again)
    return read(TokenSequence, again)


Scores = list[tuple[MicroBatch, torch.Tensor]]  # log-probabilities with their gradients


def trained(
    monkeypatch: pytest.MonkeyPatch, model: Any, items: list[TrainingSequence], temperature: float, name: str = "m2po"
) -> Scores:
    """The results of one training step on these sequences."""
    scores: Scores = []

    def watched(policy: Any, batch: MicroBatch, at: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        logprobs, entropy, values = forward(policy, batch, at)
        if logprobs.requires_grad:
            logprobs.retain_grad()
            scores.append((batch, logprobs))
        return logprobs, entropy, values

    monkeypatch.setattr(step_module, "forward", watched)
    step = train_step(algorithm(name), causal_lm=copy.deepcopy(model), temperature=temperature, max_tokens=10_000)
    step.run(rank_batch(items))
    return scores


def without_record(items: list[TrainingSequence]) -> list[TrainingSequence]:
    """The same, without the kept sets."""
    return [
        replace(i, sequence=replace(i.sequence, segments=tuple(replace(s, kept=b"") for s in i.sequence.segments)))
        for i in items
    ]


@pytest.mark.parametrize("name", SAMPLINGS)
async def test_the_ratio_of_a_policy_to_itself_is_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, sampling = build_model("qwen3"), SAMPLINGS[name]
    items = await sampled(model, 12, **sampling)
    gaps = [
        (logprobs.detach() - batch.behaviour).abs()
        for batch, logprobs in trained(monkeypatch, model, items, sampling["temperature"])
    ]
    assert torch.cat(gaps).exp().sub(1).max() <= 1e-4
    # The same with the record of what was kept thrown away: the test would notice.
    for item in items:
        assert any(s.kept for s in item.sequence.segments) == (name != "whole")
    if name != "whole":
        gaps = [
            (logprobs.detach() - batch.behaviour).abs()
            for batch, logprobs in trained(monkeypatch, model, without_record(items), sampling["temperature"])
        ]
        assert torch.cat(gaps).max() > 0.01


@pytest.mark.parametrize("name", ["m2po", "ppo_clip"])
async def test_truncated_sampling_leaves_no_more_negative_tokens_without_a_gradient_than_sampling_from_everything(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Defect 11 of the review: with top_p .7, 71% of the A < 0 tokens had none, and no A > 0 token."""
    model = build_model("qwen3")
    shares = {}
    for which in ("whole", "top_p", "forgotten"):
        of = "whole" if which == "whole" else "top_p"
        items = await sampled(model, 32, **SAMPLINGS[of])
        items = without_record(items) if which == "forgotten" else items
        scores = trained(monkeypatch, model, items, SAMPLINGS[of]["temperature"], name)
        negative = torch.cat([batch.advantages < 0 for batch, _ in scores])
        gradients = torch.cat([logprobs.grad for _, logprobs in scores if logprobs.grad is not None])
        shares[which] = float((gradients[negative] == 0).float().mean())
    assert shares["top_p"] <= shares["whole"]
    assert shares["forgotten"] > 0.5, "else the test would not notice"


async def test_a_stale_truncated_token_is_scored_over_the_set_of_its_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model("qwen3")
    narrow = {"top_p": 0.2, "temperature": 0.4}
    items = await sampled(model, 8, **narrow)
    later = perturbed(model, scale=0.02)
    (batch, logprobs), *_ = trained(monkeypatch, later, items, narrow["temperature"])
    assert batch.drawn is not None and batch.drawn.kept is not None
    sizes = np.diff(batch.drawn.kept.offsets)
    assert 0 < batch.drawn.num_sole_choices == (sizes == 1).sum() < len(sizes)
    assert torch.all(logprobs.detach()[torch.from_numpy(sizes == 1)] == 0), "a token that alone was kept stays certain"
    assert (logprobs.detach() - batch.behaviour).abs().max() > 1e-3
