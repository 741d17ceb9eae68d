"""Packed sets of kept tokens unpack to the same sets, for any sets, and invalid bytes are refused."""

from __future__ import annotations

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.kept_tokens import (
    FREE_IDS,
    WHOLE,
    KeptRow,
    KeptSets,
    check,
    head,
    kept_rows,
    left_out_row,
    pack,
    unpack,
)

VOCAB = 4096


def drawable(sets: KeptSets, vocab_size: int = VOCAB) -> list[set[int]]:
    """The tokens that could be drawn, as plain sets."""
    made = []
    for token in range(sets.num_tokens):
        ids = set(sets.ids[sets.rows == token].tolist())
        made.append(set(range(vocab_size)) - ids if sets.left_out[token] else ids)
    return made


def row_of(kept: set[int], sampled: int, vocab_size: int | None = VOCAB) -> KeptRow:
    ids = np.array([sorted(kept, key=lambda i: i * 7919 % 104729)], dtype=np.int64)
    return kept_rows(ids, np.array([len(kept)]), np.array([sampled]), vocab_size)[0]


few = st.sets(st.integers(0, VOCAB - 1), max_size=12)
many = st.builds(
    lambda seed, share: set(np.flatnonzero(np.random.default_rng(seed).random(VOCAB) < share).tolist()),
    st.integers(0, 99),
    st.sampled_from([0.2, 0.5, 0.99, 1.0]),
)
tokens_with_sets = st.lists(
    st.tuples(st.integers(0, VOCAB - 1), few | many | st.just(None), st.integers(1, 3)), min_size=1, max_size=8
)


@settings(max_examples=50, deadline=None)
@given(tokens_with_sets, st.data())
def test_what_is_unpacked_is_what_was_packed_and_so_is_any_head_of_it(
    drawn: list[tuple[int, set[int] | None, int]], data: st.DataObject
) -> None:
    tokens, rows, expected = [], [], []
    for token, kept, times in drawn:
        tokens += [token] * times
        rows += [WHOLE if kept is None else row_of(kept, token)] * times
        expected += [set(range(VOCAB)) if kept is None else kept | {token}] * times
    token_ids = np.array(tokens, dtype=np.int32)
    packed = pack(rows, len(rows))
    check(packed, token_ids)
    assert drawable(unpack(packed, token_ids)) == expected
    cut = data.draw(st.integers(0, len(tokens)))
    assert drawable(unpack(head(packed, token_ids, cut), token_ids[:cut])) == expected[:cut]
    chosen = np.array(data.draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens))))
    twice = KeptSets.concatenated([unpack(packed, token_ids), KeptSets.whole(2), unpack(packed, token_ids)])
    both = np.concatenate([chosen, [True, False], ~chosen])
    everything = [*expected, set(range(VOCAB)), set(range(VOCAB)), *expected]
    assert drawable(twice.select(both)) == [s for s, wanted in zip(everything, both, strict=True) if wanted]


@given(st.binary(max_size=40), st.integers(1, 5))
def test_bytes_that_nobody_packed_are_refused_or_say_a_set_with_the_sampled_token(data: bytes, count: int) -> None:
    token_ids = np.arange(count, dtype=np.int32)
    try:
        check(data, token_ids)
    except ValueError:
        with pytest.raises(ValueError):
            unpack(data, token_ids)
        return
    sets = unpack(data, token_ids)
    assert sets.num_tokens == count
    for token in range(count):
        assert (token in sets.ids[sets.rows == token]) != bool(sets.left_out[token])


def test_what_is_unpacked_is_bounded_by_the_bytes() -> None:
    """A few bytes that repeat one large set for every token would fill the memory of a trainer."""
    num = 2_000
    hostile = pack([left_out_row(range(1, 4 * FREE_IDS))] * num, num)
    assert len(hostile) < num
    for read in (check, unpack):
        with pytest.raises(ValueError, match=r"state \d+ bytes unpacked; at most \d+ are taken"):
            read(hostile, np.zeros(num, dtype=np.int32))
    allowed = pack([left_out_row(range(1, FREE_IDS))] * num, num)
    check(allowed, np.zeros(num, dtype=np.int32))


def test_a_set_of_more_than_half_of_the_vocabulary_is_written_as_what_is_missing() -> None:
    assert row_of(set(range(VOCAB)) - {4000}, 2).ids.tolist() == [4000]
    assert row_of(set(range(VOCAB)) - {4000}, 2).left_out
    assert not row_of({1, 2, 3}, 2).left_out and not row_of(set(range(VOCAB)), 2, vocab_size=None).left_out
    half = set(np.flatnonzero(np.random.default_rng(0).random(VOCAB) < 0.5).tolist())
    assert len(pack([row_of(half, 2)], 1)) < VOCAB // 3, "a random half takes about two bits an id"


def words(*numbers: int) -> bytes:
    planes = np.array(numbers, "<u4").view(np.uint8).reshape(-1, 4).T
    return zstandard.compress(planes.tobytes())


@pytest.mark.parametrize(
    ("packed", "tokens", "complaint"),
    [
        (b"\x01", [1], "cannot be unpacked"),
        (pack([left_out_row([5])], 1)[:-1], [1], "cannot be unpacked"),
        (pack([left_out_row([5])], 1) + b"\x00", [1], "cannot be unpacked"),
        (pack([left_out_row([5])] * 2, 2), [1], "2 tokens in 2 rows are with 1"),
        (pack([left_out_row([5])], 1), [5], "token 5"),
        (zstandard.compress(b"abc"), [1], "cut off"),
        (pack([left_out_row([5])], 1), [1, 2], "1 tokens in 1 rows are with 2"),
        (words(1, 0), [1], "in 0 rows"),
        (words(1, 1, 4, 3), [1], "state 2 ids and have 1"),
        (words(2, 2, 0), [1, 2], "state 0 ids"),
        (words(1, 1, 2, 2**32 - 1), [1], "have the id 4294967295"),
    ],
)
def test_what_no_sampler_wrote_is_refused_with_a_reason(packed: bytes, tokens: list[int], complaint: str) -> None:
    for read in (check, unpack):
        with pytest.raises(ValueError, match=complaint):
            read(packed, np.array(tokens, dtype=np.int32))
