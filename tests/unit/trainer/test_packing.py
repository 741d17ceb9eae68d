from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import InvalidRequestError
from services.common.records import Segment
from services.trainer.packing import NO_VERSION, Document, pack
from tests.unit.trainer.building import path_of, training_sequences

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
    sources = [s for m in packed for s in m.sources.tolist()]
    assert sorted(sources) == [i for i, d in enumerate(given_documents) if d.num_trained_tokens]
    for micro_batch in packed:
        assert micro_batch.num_given_tokens == sum(lengths[s] for s in micro_batch.sources.tolist())
        for d, source in enumerate(micro_batch.sources.tolist()):
            document, own = given_documents[source], micro_batch.document_index == d
            path = path_of(micro_batch.branches, int(micro_batch.predecessors[own][-1]))
            assert micro_batch.token_ids[path].tolist() == document.token_ids[: len(path)].tolist()
            assert micro_batch.position_ids[path].tolist() == list(range(len(path)))
            trained = np.flatnonzero(document.loss_mask)
            assert micro_batch.predecessors[own].tolist() == path[trained - 1].tolist()
            assert micro_batch.target_ids[own].tolist() == document.token_ids[trained].tolist()
            assert set(micro_batch.advantages[own].tolist()) == {document.advantage}


@given(lengths_lists, st.integers(1, 50))
def test_only_a_single_longer_document_exceeds_the_budget(lengths: list[int], budget: int) -> None:
    for micro_batch in pack(documents(lengths), budget):
        assert micro_batch.num_tokens <= budget or micro_batch.num_documents == 1


@given(lengths_lists, st.integers(1, 50))
def test_documents_stand_longest_first_and_ties_keep_their_order(lengths: list[int], budget: int) -> None:
    given_documents = documents(lengths)
    for micro_batch in pack(given_documents, budget):
        keys = [(-len(given_documents[s].computed), s) for s in micro_batch.sources.tolist()]
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
