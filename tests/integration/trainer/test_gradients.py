"""The gradient does not depend on packing, micro-batch size or number of ranks (invariant 5)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from services.cli.run.processes import ForkServer
from services.trainer.advantages import sequence_advantages
from services.trainer.losses import ALGORITHMS, Algorithm, TokenBatch, m2po
from services.trainer.ranks import Ranks
from tests.integration.trainer.gradient_cases import (
    CASES,
    NUM_SEQUENCES,
    PRECISIONS,
    Case,
    Gradients,
    gradients,
    trained_weights,
)
from tests.integration.trainer.launching import fork_ranks, made_once, run_processes
from tests.unit.trainer.building import algorithm, tiny_causal_lm, training_sequences

EVERYTHING = 10_000  # all documents in one micro-batch
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


def assert_same(found: Gradients, expected: Gradients, tolerance: float) -> None:
    """Relative to the largest entry of each tensor."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        scale = np.abs(value).max()
        assert scale > 0, f"{name} has no gradient, so this case shows nothing"
        assert np.abs(found[name] - value).max() <= tolerance * scale, name


def padded_gradients(case: Case) -> Gradients:
    """Everything done the plain way: right-padded rows, transformers' own attention and full logits."""
    model = tiny_causal_lm(case.dtype, tied=case.tied)
    sequences = training_sequences(NUM_SEQUENCES)
    longest = max(s.sequence.num_tokens for s in sequences)
    shape = (len(sequences), longest)
    token_ids, present, mask = (torch.zeros(shape, dtype=t) for t in (torch.int64, torch.int64, torch.bool))
    behaviour, advantages = (torch.zeros(shape, dtype=case.dtype) for _ in range(2))
    for row, (item, advantage) in enumerate(
        zip(sequences, sequence_advantages(sequences, case.config).tolist(), strict=True)
    ):
        present[row, : item.sequence.num_tokens] = 1
        advantages[row] = advantage
        start = 0
        for segment in item.sequence.segments:
            end = start + segment.num_tokens
            token_ids[row, start:end] = torch.as_tensor(segment.token_ids, dtype=torch.int64)
            if segment.is_policy:
                mask[row, start:end] = True
                behaviour[row, start:end] = torch.as_tensor(segment.logprobs)
            start = end
    log_p = (model(input_ids=token_ids, attention_mask=present).logits / case.temperature).log_softmax(-1)
    logprobs = log_p[:, :-1].gather(2, token_ids[:, 1:, None])[:, :, 0]
    kept = mask[:, 1:]
    rows = torch.arange(len(sequences))[:, None].expand_as(kept)
    loss = ALGORITHMS[case.config.name].loss(
        TokenBatch(
            logprobs=logprobs[kept],
            behaviour=behaviour[:, 1:][kept],
            advantages=advantages[:, 1:][kept],
            mask=torch.ones(int(kept.sum()), dtype=torch.bool),
            sequence_index=rows[kept],
            num_sequences=len(sequences),
            proximal=logprobs[kept].detach(),
        ),
        case.config,
    )
    (loss.per_token.sum() / kept.sum()).backward()
    return {n: p.grad.double().numpy() for n, p in model.named_parameters() if p.grad is not None}


@functools.cache
def in_one_pass(name: str) -> Gradients:
    """The gradients of one rank whose micro-batch holds everything; every test of a case compares with them."""
    return gradients(CASES[name], Ranks.single(), EVERYTHING)


@pytest.fixture(scope="module")
def two_rank_files(tmp_path_factory: pytest.TempPathFactory, forks: ForkServer) -> Path:
    """The results of two real processes with gloo. ``trainer_service/test_several_nodes`` starts them by torchrun."""

    def make(directory: Path) -> None:
        module, logs = "tests.integration.trainer.gradient_cases", directory / "logs"
        run_processes(fork_ranks(forks, module, [str(directory)], 2, logs), logs)

    return made_once(tmp_path_factory, "two_ranks", make)


@pytest.fixture
def two_ranks(two_rank_files: Path) -> Callable[[str], Gradients]:
    """Their results by name."""

    def load(name: str) -> Gradients:
        with np.load(two_rank_files / f"{name}.npz") as file:
            return dict(file)

    return load


@pytest.mark.parametrize("name", ["ppo_clip", "m2po", "gspo", "decoupled_ppo", "untied_hot", "float32"])
def test_packed_equals_padded(name: str) -> None:
    case = CASES[name]
    assert_same(in_one_pass(name), padded_gradients(case), TOLERANCE[case.dtype])


@pytest.mark.parametrize("name", sorted(CASES))
@pytest.mark.parametrize("max_tokens", [1, 23])
def test_any_micro_batch_size_gives_the_same_gradient(name: str, max_tokens: int) -> None:
    case = CASES[name]
    assert_same(gradients(case, Ranks.single(), max_tokens), in_one_pass(name), TOLERANCE[case.dtype])


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CASES))
def test_two_ranks_give_the_gradient_of_one(name: str, two_ranks: Callable[[str], Gradients]) -> None:
    case = CASES[name]
    assert_same(two_ranks(name), in_one_pass(name), TOLERANCE[case.dtype])


@pytest.mark.slow
def test_gradient_checkpointing_on_two_ranks_changes_nothing(two_ranks: Callable[[str], Gradients]) -> None:
    assert_same(two_ranks("checkpointed"), in_one_pass("m2po"), 1e-9)


@pytest.mark.slow
def test_two_ranks_train_the_weights_and_metrics_of_one(two_ranks: Callable[[str], Gradients]) -> None:
    weights, metrics = trained_weights(Ranks.single())
    found = two_ranks("weights")
    assert found.keys() == weights.keys()
    for name, value in weights.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-7, err_msg=name)
    for rank in (0, 1):
        of_rank = {n: v.item() for n, v in two_ranks(f"metrics_{rank}").items()}
        assert of_rank == pytest.approx(metrics, rel=1e-6, abs=1e-9)


@pytest.mark.slow
def test_ranks_with_different_counts_raise_on_each_rank(two_rank_files: Path) -> None:
    """Sums of different lengths would abort the process, or add up different values."""
    for rank in (0, 1):
        said = (two_rank_files / f"refusal_{rank}").read_text()
        assert "the ranks of a training step have different counts" in said
        assert ("seen_tokens" in said) == (rank == 0)


@pytest.mark.slow
def test_moments_on_the_host_train_the_same_bits(two_ranks: Callable[[str], Gradients]) -> None:
    """Moments on the host and updated by buckets, the reference gathered from there."""
    expected, found = two_ranks("precision_with_reference"), two_ranks("precision_offloaded")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert np.array_equal(found[name], value), name


@pytest.mark.slow
def test_an_adapter_on_two_ranks_is_trained_as_on_one(two_ranks: Callable[[str], Gradients]) -> None:
    expected, _ = trained_weights(Ranks.single(), **PRECISIONS["adapter"])
    found, start = two_ranks("precision_adapter"), dict(tiny_causal_lm(torch.float64).named_parameters())
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-7, err_msg=name)
        if name in start:
            assert np.array_equal(found[name], start[name].detach().numpy()), f"{name} is of the frozen base"
    assert min(np.abs(value).max() for name, value in found.items() if "lora_B" in name) > 1e-3, "they start at 0"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["value_head", "value_head_offloaded"])
def test_a_value_head_on_two_ranks_is_trained_as_on_one(kind: str, two_ranks: Callable[[str], Gradients]) -> None:
    expected, _ = trained_weights(Ranks.single(), **PRECISIONS["value_head"])
    found = two_ranks(f"precision_{kind}")
    assert found.keys() == expected.keys() and {"value_head.weight", "value_head.bias"} <= found.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-7, err_msg=name)
    assert np.abs(found["value_head.weight"]).max() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bfloat16_compute", "bfloat16_master"])
def test_bfloat16_trains_close_to_float32(kind: str, two_ranks: Callable[[str], Gradients]) -> None:
    """Four updates of 1e-2 each; the effect of a rounded sum is bounded by the update."""
    expected, found, start = two_ranks("precision_float32"), two_ranks(f"precision_{kind}"), tiny_causal_lm()
    moved = far = 0.0
    for name, weight in start.named_parameters():
        begin = weight.detach().numpy()
        moved += float(np.square(expected[name] - begin).sum())
        far += float(np.square(found[name] - expected[name]).sum())
        assert not np.array_equal(found[name], expected[name]), f"{name}: nothing was computed in bfloat16"
    assert far < 0.25 * moved, (far, moved)


def test_m2po_per_micro_batch_does_depend_on_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why the region is of the whole minibatch; also shows that the tests above can fail."""
    monkeypatch.setitem(ALGORITHMS, "m2po", Algorithm(m2po))
    case = Case(config=algorithm(name="m2po", m2po_threshold=0.2))
    whole = gradients(case, Ranks.single(), EVERYTHING)
    with pytest.raises(AssertionError):
        assert_same(gradients(case, Ranks.single(), 23), whole, 1e-9)
