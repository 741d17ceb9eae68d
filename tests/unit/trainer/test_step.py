from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from services.common.config.training import OptimizerConfig
from services.common.errors import InvalidRequestError
from services.common.records import Segment, TrainingSequence
from services.trainer.advantages import sequence_advantages
from services.trainer.metrics import Sums, Usage
from services.trainer.model.micro_batches import Document
from services.trainer.model.policy_model import PolicyModel
from services.trainer.ranks import Ranks
from services.trainer.step import TrainStep
from services.trainer.warm_start import supervised_update
from tests.metrics_catalogue import is_documented
from tests.unit.trainer.building import algorithm, rank_batch, tiny_causal_lm, train_step, training_sequences

MEASURED = ("seconds", "tokens_per_second", "tflops", "memory_peak_gib")  # of the clock and the machine


def weights(step: TrainStep) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in step.model.named_parameters()}


def on_policy(sequences: list[TrainingSequence], temperature: float = 1.0) -> list[TrainingSequence]:
    """The same tokens, with the log-probabilities that transformers' own forward pass gives them."""
    model = tiny_causal_lm()
    result = []
    for item in sequences:
        ids = torch.as_tensor(item.sequence.token_ids, dtype=torch.int64)
        with torch.no_grad():
            log_p = (model(input_ids=ids[None]).logits[0] / temperature).log_softmax(-1)
        behaviour = torch.cat([torch.zeros(1), log_p[:-1].gather(1, ids[1:, None])[:, 0]]).numpy()
        segments, start = [], 0
        for segment in item.sequence.segments:
            end = start + segment.num_tokens
            if segment.is_policy:
                segment = Segment.policy(segment.token_ids, behaviour[start:end], segment.weight_version)
            segments.append(segment)
            start = end
        sequence = dataclasses.replace(item.sequence, segments=tuple(segments))
        result.append(dataclasses.replace(item, sequence=sequence))
    return result


@pytest.mark.parametrize("name", ["m2po", "m2po_mask", "decoupled_ppo", "gspo"])
def test_replaying_a_batch_from_the_same_state_is_bit_exact(name: str) -> None:
    batch = rank_batch(training_sequences(12, minibatches=3))
    config = algorithm(name=name, entropy_coefficient=0.01)  # type: ignore[arg-type]
    results = []
    for _ in range(2):
        step = train_step(config)
        metrics = step.run(batch).as_dict() | dict.fromkeys(MEASURED, 0.0)
        results.append((weights(step), metrics))
    (first, first_metrics), (second, second_metrics) = results
    assert all(torch.equal(first[n], second[n]) for n in first)
    assert first_metrics == second_metrics


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_on_policy_data_shows_no_mismatch(temperature: float) -> None:
    step = train_step(algorithm(name="ppo_clip"), temperature=temperature)
    metrics = step.run(rank_batch(on_policy(training_sequences(8, minibatches=2), temperature)))
    assert metrics.mismatch_abs < 1e-5
    assert abs(metrics.mismatch_kl) < 1e-6


def test_mismatch_is_taken_before_any_update_and_apart_for_fresh_tokens() -> None:
    sequences = training_sequences(8, minibatches=2)
    metrics = train_step(algorithm(name="ppo_clip"), optimizer=OptimizerConfig(lr=10.0)).run(rank_batch(sequences))
    again = train_step(algorithm(name="ppo_clip"), optimizer=OptimizerConfig(lr=1e-9)).run(rank_batch(sequences))
    assert metrics.mismatch_abs == again.mismatch_abs > 0.1
    assert metrics.mismatch_kl == again.mismatch_kl > 0.0
    first = [s for item in sequences if item.minibatch == 0 for s in item.sequence.segments if s.is_policy]
    fresh = sum(s.num_tokens for s in first if s.weight_version == 4)
    assert metrics.fresh_share == pytest.approx(fresh / sum(s.num_tokens for s in first))


def far_off(item: TrainingSequence, gap: float) -> TrainingSequence:
    """The same tokens, said to have been exp(gap) times less likely when they were sampled."""
    segments = tuple(
        Segment.policy(s.token_ids, s.logprobs - gap, s.weight_version) if s.is_policy else s
        for s in item.sequence.segments
    )
    return dataclasses.replace(item, sequence=dataclasses.replace(item.sequence, segments=segments))


@pytest.mark.parametrize("max_tokens", [24, 4096])
@pytest.mark.parametrize(("limit", "applied"), [(None, 3), (7.0, 3), (5.0, 1)])
def test_updates_stop_where_the_mean_ratio_is_above_its_limit(
    limit: float | None, applied: int, max_tokens: int
) -> None:
    """The second of three minibatches has a mean ratio of 6, with any packing."""
    sequences = on_policy(training_sequences(12, minibatches=3))
    sequences = [far_off(s, math.log(6.0)) if s.minibatch == 1 else s for s in sequences]
    config = algorithm(name="ppo_clip", early_stop_ratio=limit)
    slow = OptimizerConfig(lr=1e-6)  # so that the first update leaves the ratios as they are
    step = train_step(config, optimizer=slow, max_tokens=max_tokens)
    metrics = step.run(rank_batch(sequences))
    assert (metrics.updates_applied, metrics.updates_skipped) == (applied, 3 - applied)
    assert step.optimizer.num_updates == 3, "the schedule follows the data"
    assert all(p.grad is None for p in step.model.parameters())
    if applied == 1:
        alone = train_step(algorithm(name="ppo_clip"), optimizer=slow, max_tokens=max_tokens)
        first = [s for s in sequences if s.minibatch == 0]
        alone.run(rank_batch(first))
        for name, value in weights(alone).items():
            assert torch.equal(weights(step)[name], value), "as if there were no other minibatch"


def without_trained_tokens(item: TrainingSequence) -> TrainingSequence:
    segments = tuple(s for s in item.sequence.segments if not s.is_policy)
    return dataclasses.replace(item, sequence=dataclasses.replace(item.sequence, segments=segments))


def test_a_minibatch_without_trained_tokens_is_skipped_and_counted() -> None:
    sequences = training_sequences(4, minibatches=2)
    sequences[:2] = [without_trained_tokens(s) for s in sequences[:2]]
    step = train_step(algorithm())
    metrics = step.run(rank_batch(sequences))
    assert metrics.updates_applied == 1
    assert metrics.updates_skipped == 1
    assert step.optimizer.num_updates == 2


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted() -> None:
    sequences = [dataclasses.replace(s, group_mean=float("nan")) for s in training_sequences(4)]
    step = train_step(algorithm())
    before = weights(step)
    metrics = step.run(rank_batch(sequences))
    assert metrics.updates_skipped == 1
    assert metrics.updates_applied == 0
    assert all(torch.equal(before[n], p) for n, p in weights(step).items())


def test_wrong_totals_are_refused() -> None:
    batch = rank_batch(training_sequences(4))
    wrong = dataclasses.replace(batch.minibatches[0], num_trained_tokens=1)
    with pytest.raises(InvalidRequestError, match="headers state"):
        train_step(algorithm()).run(dataclasses.replace(batch, minibatches=(wrong,)))


def test_advantages_pay_the_kl_from_a_token_to_the_end_of_its_sequence() -> None:
    """Against a plain loop over sequences; normalised, the whole batch has mean 0 and deviation 1."""
    sequences, plain_reference = training_sequences(6, minibatches=2), tiny_causal_lm(seed=1)
    for normalized in (False, True):
        config = algorithm(kl_reward_coefficient=0.3, batch_normalize_advantages=normalized)
        step = train_step(config, reference=tiny_causal_lm(seed=1), max_tokens=20)
        packed = step._pack(rank_batch(sequences), Sums(torch.device("cpu")))
        found = torch.cat([m.advantages for minibatch in packed for m in minibatch])
        expected = []
        plain = sequence_advantages(sequences, config).tolist()
        for item, advantage in zip(sequences, plain, strict=True):
            ids = torch.as_tensor(item.sequence.token_ids, dtype=torch.int64)
            with torch.no_grad():
                log_p = plain_reference(input_ids=ids[None]).logits[0].log_softmax(-1)
            ref = [0.0, *log_p[:-1].gather(1, ids[1:, None])[:, 0].tolist()]
            gaps, start = [], 0
            for segment in item.sequence.segments:
                if segment.is_policy:
                    gaps += [b - r for b, r in zip(segment.logprobs.tolist(), ref[start:], strict=False)]
                start += segment.num_tokens
            expected += [advantage - 0.3 * sum(gaps[i:]) for i in range(len(gaps))]
        if normalized:
            mean, std = np.mean(expected), np.std(expected)
            expected = [(e - mean) / (std + 1e-5) for e in expected]
        assert sorted(found.tolist()) == pytest.approx(sorted(expected), rel=1e-4, abs=1e-5)


def supervised_documents() -> list[Document]:
    rng = np.random.default_rng(0)
    return [Document.supervised(rng.integers(0, 31, n), np.arange(n) >= 3, f"row {n}") for n in (5, 9, 9, 14)]


def test_supervised_loss_is_cross_entropy_over_masked_tokens() -> None:
    step = train_step(algorithm())
    documents = supervised_documents()
    plain, total = tiny_causal_lm(), 0.0
    for document in documents:
        ids = torch.as_tensor(document.token_ids, dtype=torch.int64)
        logits = plain(input_ids=ids[None]).logits[0]
        total += torch.nn.functional.cross_entropy(logits[2:-1], ids[3:], reduction="sum").item()
    first, num_trained, _ = supervised_update(step.model, step.optimizer, step.ranks, documents, 20)
    assert num_trained == sum(d.num_trained_tokens for d in documents)
    assert first == pytest.approx(total / sum(d.num_trained_tokens for d in documents), rel=1e-5)
    for _ in range(20):
        last, _, _ = supervised_update(step.model, step.optimizer, step.ranks, documents, 20)
    assert last < first


def test_tokens_of_a_kept_cache_are_not_fresh() -> None:
    """Their version is the newest, but older weights computed a part of their context."""
    sequences = training_sequences(8)
    kept = [
        dataclasses.replace(
            item,
            sequence=dataclasses.replace(
                item.sequence,
                segments=tuple(dataclasses.replace(s, mixed_cache=s.is_policy) for s in item.sequence.segments),
            ),
        )
        for item in sequences[:4]
    ]
    whole = train_step(algorithm()).run(rank_batch(sequences))
    half = train_step(algorithm()).run(rank_batch(kept + sequences[4:]))
    fresh = [
        sum(s.num_tokens for item in items for s in item.sequence.segments if s.is_policy and s.weight_version == 4)
        for items in (sequences, sequences[4:])
    ]
    assert half.fresh_share / whole.fresh_share == pytest.approx(fresh[1] / fresh[0])
    assert half.mismatch_fresh_abs != whole.mismatch_fresh_abs
    assert half.mismatch_abs == whole.mismatch_abs, "all tokens count there"


@pytest.mark.parametrize("name", ["m2po", "m2po_mask", "decoupled_ppo", "sapo", "cispo"])
def test_every_metric_of_a_step_is_documented(name: str) -> None:
    metrics = train_step(algorithm(name)).run(rank_batch(training_sequences(8, minibatches=2)))
    assert [key for key in metrics.as_dict() if not is_documented(f"trainer/{key}")] == []


def test_a_minibatch_of_which_all_is_rejected_makes_no_update() -> None:
    """A gradient of zeros would still move the weights, by Adam's moments and the weight decay."""
    sequences = training_sequences(8, minibatches=2)
    nothing = train_step(algorithm("ppo_clip", rejection=[{"lower": 1e6}]))
    before = {name: weight.clone() for name, weight in nothing.model.named_parameters()}
    metrics = nothing.run(rank_batch(sequences))
    assert (metrics.updates_applied, metrics.updates_skipped) == (0, 2)
    assert metrics.algorithm["left_out_share"] == 1.0
    assert all(torch.equal(weight, before[name]) for name, weight in nothing.model.named_parameters())


def test_rejection_is_by_the_policy_at_step_start() -> None:
    """The second minibatch is judged by the weights before the first update, however large that was."""
    sequences = training_sequences(8, minibatches=2)
    criteria = [{"level": "sequence", "lower": 0.3, "upper": 1.5}]
    shares = []
    for lr in (1e-9, 10.0):
        step = train_step(algorithm("ppo_clip", rejection=criteria), optimizer=OptimizerConfig(lr=lr))
        shares.append(step.run(rank_batch(sequences)).algorithm["left_out_share"])
    assert 0 < shares[0] < 1 and shares[0] == shares[1]


# -- Operations of a step equal torch's own count; unknown values are not reported.


LENGTH = 12


def qwen2() -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=40, hidden_size=24, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=1,
        intermediate_size=50, tie_word_embeddings=False,
    )  # fmt: skip
    return Qwen2ForCausalLM(config)  # no head_dim of its own, biases on queries, keys and values


@pytest.mark.parametrize("make", [tiny_causal_lm, lambda: tiny_causal_lm(tied=False), qwen2])
def test_the_formula_counts_as_many_operations_as_torch(make) -> None:  # type: ignore[no-untyped-def]
    """Eager attention multiplies all pairs, and every token passes the head: so the test compares with these numbers."""
    plain = make()
    plain.set_attn_implementation("eager")
    ids = torch.arange(LENGTH)[None]
    with FlopCounterMode(display=False) as counter:
        logits = plain(input_ids=ids).logits
    forward = counter.get_total_flops()
    cost = Usage(PolicyModel(make()), Ranks.single(), None)
    assert (cost.per_token + cost.per_target) * LENGTH + cost.per_pair * LENGTH * LENGTH == forward
    with FlopCounterMode(display=False) as counter:
        logits.sum().backward()
    assert counter.get_total_flops() == 2 * forward, "backwards is twice forwards"


def test_a_step_tells_its_operations_memory_and_share_of_the_peak() -> None:
    sequences = training_sequences(8)
    step = train_step(algorithm(name="ppo_clip"), max_tokens=30)
    metrics = step.run(rank_batch(sequences))
    cost = Usage(step.model, step.ranks, None)
    assert metrics.tflops is not None
    lengths = [s.sequence.num_tokens - 1 for s in sequences]  # the last token predicts nothing
    assert metrics.num_computed_tokens == sum(lengths) == metrics.num_tokens - len(sequences)
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    needed = 3 * (cost.per_token * sum(lengths) + cost.per_target * metrics.num_trained_tokens + cost.per_pair * pairs)
    assert metrics.tflops * 1e12 * metrics.seconds == pytest.approx(needed)
    assert metrics.memory_peak_gib > 0.05
    assert metrics.mfu is None and "mfu" not in metrics.as_dict(), "nobody knows what this CPU can do"

    known = train_step(algorithm(name="ppo_clip"), peak_flops=1e12).run(rank_batch(sequences))
    assert known.mfu == pytest.approx(known.tflops) and known.as_dict()["mfu"] == known.mfu
