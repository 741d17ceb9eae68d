"""Common beginnings of documents are computed once, without another change of results."""

from __future__ import annotations

import dataclasses
import functools
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from services.common.errors import InvalidRequestError
from services.common.records import Segment
from services.trainer.model import attention as attention_module
from services.trainer.model.attention import documents_attention
from services.trainer.model.micro_batches import NO_VERSION, WORTHWHILE, Document, MicroBatch, forward, pack
from services.trainer.model.policy_model import PolicyModel, value_head_for
from tests.unit.trainer.building import (
    VOCAB,
    algorithm,
    path_of,
    rank_batch,
    tiny_causal_lm,
    train_step,
    training_sequences,
)

ALONE = 10**9


@st.composite
def related_documents(draw: st.DrawFn) -> list[Document]:
    """Up to a dozen, each with a beginning of an earlier one (now and then the whole) and a few tokens of its own."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    made: list[Document] = []
    for _ in range(draw(st.integers(1, 12))):
        ids = np.zeros(0, dtype=np.int32)
        if made and draw(st.integers(0, 4)):
            earlier = made[draw(st.integers(0, len(made) - 1))].token_ids
            ids = earlier[: draw(st.integers(0, len(earlier)))]
        ids = np.concatenate([ids, rng.integers(0, VOCAB, draw(st.integers(0, 14)))]).astype(np.int32)
        begin = draw(st.integers(1, 20))  # of what is trained; beyond the end: nothing
        mask = (np.arange(len(ids)) >= begin) & (rng.random(len(ids)) < draw(st.sampled_from([0.3, 1.0])))
        made.append(dataclasses.replace(Document.supervised(ids, mask), advantage=float(len(made))))
    return made


def document(*ids: int, trained: int) -> Document:
    """Trained from that position on."""
    return Document.supervised(np.array(ids, dtype=np.int32), np.arange(len(ids)) >= trained)


IDENTICAL = [document(1, 2, 3, 4, trained=2)] * 3
ONE_IS_A_PREFIX = [document(5, 6, 7, trained=1), document(5, 6, 7, 8, 9, trained=1), document(5, 6, trained=1)]
ONE_TOKEN_EACH = [document(1, 2, 3, 4, n, trained=4) for n in range(5)]
NOTHING_TRAINED = [document(1, 2, 3, trained=9), document(1, 2, 3, 4, trained=3), document(trained=0)]
OTHER_MASKS = [document(1, 2, 3, 4, 5, trained=1), document(1, 2, 3, 4, 6, trained=4)]
EXAMPLES = [IDENTICAL, ONE_IS_A_PREFIX, ONE_TOKEN_EACH, NOTHING_TRAINED, OTHER_MASKS]


def predecessors_of(batch: MicroBatch) -> torch.Tensor:
    """The row that predicts each target."""
    return batch.targets.each(batch.targets.predecessors)


def examples(test: Any) -> Any:
    return functools.reduce(lambda wrapped, case: example(case, 30)(wrapped), EXAMPLES, test)


# -- what shares ---------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(related_documents(), st.integers(1, 60))
@examples
def test_each_row_is_computed_once_and_each_document_finds_its_tokens(made: list[Document], budget: int) -> None:
    for batch in pack(made, budget):
        assert len(batch.token_ids) <= budget or batch.num_sequences == 1
        seen = np.zeros(len(batch.token_ids), dtype=bool)
        for index, source in enumerate(batch.sources):
            own = batch.sequence_index == index
            path = path_of(batch.documents.branches, int(predecessors_of(batch)[own].max()))
            assert batch.token_ids[path].tolist() == made[source].computed.tolist()
            assert batch.position_ids[path].tolist() == list(range(len(path)))
            seen[path] = True
        assert seen.all(), "a row that no document sees"
        assert len(batch.token_ids) == sum(branch.length for branch in batch.documents.branches)


def test_a_family_larger_than_the_budget_is_cut_and_each_part_has_the_beginning() -> None:
    prompt = list(range(10))
    made = [document(*prompt, 20 + n, 1, trained=10) for n in range(6)]
    assert [len(b.token_ids) for b in pack(made, 100)] == [10 + 6]
    cut = pack(made, 13)
    assert [len(b.token_ids) for b in cut] == [13, 13]
    assert sorted(s for b in cut for s in b.sources) == list(range(6))


# -- what is computed ----------------------------------------------------------------------------------------------------


def _exact_norm(norm: Any, x: torch.Tensor) -> torch.Tensor:
    scaled: torch.Tensor = norm.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.variance_epsilon)
    return scaled


def exact_causal_lm(dtype: torch.dtype, seed: int = 0) -> Any:
    """Its norms compute in ``dtype``: transformers' round to float32, for every type of the model."""
    causal_lm = tiny_causal_lm(dtype, seed=seed)
    for module in causal_lm.modules():
        if type(module).__name__ == "Qwen3RMSNorm":
            module.forward = MethodType(_exact_norm, module)
    return causal_lm


@functools.cache
def model_of(dtype: torch.dtype) -> PolicyModel:
    causal_lm = exact_causal_lm(dtype)
    head = value_head_for(causal_lm)
    with torch.no_grad():
        head.weight.copy_(torch.linspace(-1, 1, len(head.weight)))
    return PolicyModel(causal_lm, value_head=head)


def scores_and_gradient(
    model: PolicyModel, batches: list[MicroBatch], sources: list[list[int]]
) -> tuple[dict[int, list[torch.Tensor]], list[torch.Tensor]]:
    """By document: log-probabilities, entropies and values; and the gradient of a sum in which each weighs differently."""
    model.zero_grad()
    found: dict[int, list[torch.Tensor]] = {}
    for batch, of_batch in zip(batches, sources, strict=True):
        logprobs, entropy, values = forward(model, batch, 1.0)
        assert values is not None
        weight = batch.advantages + 1.0
        (weight * (logprobs + 0.3 * entropy + 0.7 * values)).sum().backward()  # type: ignore[no-untyped-call]
        for index, source in enumerate(of_batch):
            own = batch.sequence_index == index
            found[source] = [t[own].detach() for t in (logprobs, entropy, values)]
    return found, [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


def packed(made: list[Document], budget: int, dtype: torch.dtype) -> tuple[list[MicroBatch], list[list[int]]]:
    batches = pack(made, budget, "cpu", dtype)
    return batches, [list(b.sources) for b in batches]


def assert_the_same_as_alone(made: list[Document], budget: int, dtype: torch.dtype, tolerance: float) -> None:
    model = model_of(dtype)
    found, gradient = scores_and_gradient(model, *packed(made, budget, dtype))
    alone: list[MicroBatch] = []
    sources: list[list[int]] = []
    for index, one in enumerate(made):
        batches, _ = packed([one], ALONE, dtype)
        alone += batches
        sources += [[index]] * len(batches)
    expected, expected_gradient = scores_and_gradient(model, alone, sources)
    assert found.keys() == expected.keys()
    for source, scores in expected.items():
        for ours, theirs in zip(found[source], scores, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    scale = max(1.0, max(float(g.abs().max()) for g in expected_gradient))
    for ours, theirs in zip(gradient, expected_gradient, strict=True):
        torch.testing.assert_close(ours / scale, theirs / scale, rtol=tolerance, atol=tolerance)


@settings(max_examples=40, deadline=None)
@given(related_documents(), st.integers(1, 80))
@examples
def test_shared_and_unshared_give_the_same_in_float64(made: list[Document], budget: int) -> None:
    assert_the_same_as_alone(made, budget, torch.float64, 1e-10)


@settings(max_examples=10, deadline=None)
@given(related_documents())
def test_blocks_of_any_size_give_the_same(made: list[Document]) -> None:
    for rows, pairs in ((1, 1), (3, 1), (7, 1 << 16)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attention_module, "BLOCK_ROWS", rows)
            patch.setattr(attention_module, "_PADDED_PAIRS", pairs)
            assert_the_same_as_alone(made, ALONE, torch.float64, 1e-10)


@pytest.mark.parametrize("cut", [False, True])
def test_a_step_does_not_depend_on_common_beginnings(cut: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight rollouts of each prompt; sets that truncated sampling kept and temperatures differ within a group."""
    prompts = [item.sequence.segments[0] for item in training_sequences(16, seed=3)]
    items = []
    for index, item in enumerate(training_sequences(16, seed=4, cut=cut)):
        segments = (prompts[index // 8], *item.sequence.segments[1:])
        items.append(dataclasses.replace(item, sequence=dataclasses.replace(item.sequence, segments=segments)))
    config = algorithm("m2po", entropy_coefficient=0.02, kl_coefficient=0.1)
    found = []
    for least in (WORTHWHILE, 2.0):
        monkeypatch.setattr("services.trainer.model.micro_batches.WORTHWHILE", least)
        step = train_step(
            config, causal_lm=exact_causal_lm(torch.float64), reference=exact_causal_lm(torch.float64, seed=1)
        )
        found.append((step.run(rank_batch(items)), [p.detach().clone() for p in step.model.parameters()]))
    (shared, ours), (unshared, theirs) = found
    assert shared.num_computed_tokens < unshared.num_computed_tokens
    assert shared.grad_norm == pytest.approx(unshared.grad_norm, rel=1e-10)
    assert (shared.loss, shared.entropy, shared.kl_reference) == pytest.approx(
        (unshared.loss, unshared.entropy, unshared.kl_reference), rel=1e-10
    )
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


# -- how kernels are called ----------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(related_documents())
def test_keys_and_offsets_for_variable_length_kernels_are_those_of_attention_at_the_lower_right(
    made: list[Document],
) -> None:
    """The arithmetic that the GPU kernels get, computed here with SDPA branch by branch."""
    for batch in pack(made, ALONE):
        documents, num_tokens = batch.documents, len(batch.token_ids)
        torch.manual_seed(0)
        q, k, v = (torch.randn(1, heads, num_tokens, 8, dtype=torch.float64) for heads in (4, 2, 2))
        expected, _ = documents_attention(torch.nn.Identity(), q, k, v, documents=documents)
        rows = documents.key_rows
        keys, values = (t if rows is None else t.index_select(2, rows) for t in (k, v))
        found = []
        starts, key_starts = documents.offsets.tolist(), documents.key_offsets.tolist()
        assert len(starts) == len(key_starts) == len(documents.branches) + 1
        assert starts[-1] == num_tokens and key_starts[-1] == keys.shape[2]
        for branch in range(len(documents.branches)):
            own = slice(starts[branch], starts[branch + 1])
            seen = slice(key_starts[branch], key_starts[branch + 1])
            length, num_keys = own.stop - own.start, seen.stop - seen.start
            assert length <= documents.max_branch and num_keys <= documents.max_length
            mask = torch.ones(length, num_keys, dtype=torch.bool).tril(num_keys - length)
            found.append(
                scaled_dot_product_attention(
                    q[:, :, own], keys[:, :, seen], values[:, :, seen], attn_mask=mask, enable_gqa=True
                )
            )
        torch.testing.assert_close(torch.cat(found, dim=2).transpose(1, 2), expected, rtol=1e-12, atol=1e-12)


lengths_lists = st.lists(st.integers(0, 30), max_size=40)


def documents(lengths: list[int]) -> list[Document]:
    """Documents with their own index as token ids, so that a test detects swapped tokens."""
    return [
        dataclasses.replace(
            Document.supervised(np.full(n, i, dtype=np.int32), np.arange(n) % 3 == 1), advantage=float(i)
        )
        for i, n in enumerate(lengths)
    ]


@given(lengths_lists, st.integers(1, 50))
def test_nothing_is_lost_or_doubled_for_any_budget(lengths: list[int], budget: int) -> None:
    given_documents = documents(lengths)
    packed = pack(given_documents, budget)
    sources = [s for m in packed for s in m.sources]
    assert sorted(sources) == [i for i, d in enumerate(given_documents) if d.num_trained_tokens]
    for micro_batch in packed:
        assert micro_batch.num_given_tokens == sum(lengths[s] for s in micro_batch.sources)
        for d, source in enumerate(micro_batch.sources):
            document, own = given_documents[source], micro_batch.sequence_index == d
            predecessors, targets = predecessors_of(micro_batch)[own], micro_batch.targets
            path = path_of(micro_batch.documents.branches, int(predecessors[-1]))
            assert micro_batch.token_ids[path].tolist() == document.token_ids[: len(path)].tolist()
            assert micro_batch.position_ids[path].tolist() == list(range(len(path)))
            trained = np.flatnonzero(document.loss_mask)
            assert predecessors.tolist() == path[trained - 1].tolist()
            assert targets.each(targets.token_ids)[own].tolist() == document.token_ids[trained].tolist()
            assert set(micro_batch.advantages[own].tolist()) == {document.advantage}


@given(lengths_lists, st.integers(1, 50))
def test_documents_stand_longest_first_and_ties_keep_their_order(lengths: list[int], budget: int) -> None:
    given_documents = documents(lengths)
    for micro_batch in pack(given_documents, budget):
        keys = [(-len(given_documents[s].computed), s) for s in micro_batch.sources]
        assert keys == sorted(keys)


def test_a_training_sequence_keeps_exactly_the_sampled_tokens() -> None:
    item = training_sequences(1)[0]
    document = Document.from_training_sequence(item, 0.5)
    policy = [s for s in item.sequence.segments if s.is_policy]
    assert document.token_ids[document.loss_mask].tolist() == [t for s in policy for t in s.token_ids.tolist()]
    assert document.behaviour[document.loss_mask].tolist() == [b for s in policy for b in s.logprobs.tolist()]
    assert set(document.weight_versions[~document.loss_mask].tolist()) == {NO_VERSION}
    assert document.token_ids.tolist() == item.sequence.token_ids.tolist()


def test_a_sequence_without_a_prompt_is_refused_by_name() -> None:
    item = training_sequences(1)[0]
    bare = dataclasses.replace(item.sequence, segments=(Segment.policy([1, 2], [-1.0, -1.0], 0),))
    with pytest.raises(InvalidRequestError, match="g0/0/0 trains its first token"):
        Document.from_training_sequence(dataclasses.replace(item, sequence=bare), 0.0)
