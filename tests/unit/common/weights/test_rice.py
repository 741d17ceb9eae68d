"""Lists of numbers survive as Rice codes, and bytes that hold other lists than announced are refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import CorruptDataError
from services.common.weights.planes import PlaneReader, pack_plane, pack_varint
from services.common.weights.rice import RiceReader, RiceWriter, choose_parameter

LARGEST = 2**32 - 1


def written(lists: list[np.ndarray]) -> tuple[bytes, list[int]]:
    writer, parameters = RiceWriter(), [choose_parameter(numbers)[0] for numbers in lists]
    for numbers, parameter in zip(lists, parameters, strict=True):
        writer.add(numbers, parameter)
    return writer.finish(), parameters


def reader_of(data: bytes, lists: list[np.ndarray], parameters: list[int], max_zeros: int = 10**7) -> RiceReader:
    low_bits = sum(len(numbers) * parameter for numbers, parameter in zip(lists, parameters, strict=True))
    return RiceReader(
        PlaneReader(memoryview(data)), count=sum(map(len, lists)), num_low_bits=low_bits, max_zeros=max_zeros
    )


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 300), st.sampled_from([0.9, 0.3, 0.01, 1e-4, 1e-9])).map(
            lambda drawn: np.minimum(np.random.default_rng(drawn[0]).geometric(drawn[1], drawn[0]) - 1, LARGEST)
        ),
        max_size=6,
    )
)
def test_lists_survive(lists: list[np.ndarray]) -> None:
    data, parameters = written(lists)
    reader = reader_of(data, lists, parameters)
    for numbers, parameter in zip(lists, parameters, strict=True):
        assert np.array_equal(reader.take(len(numbers), parameter, below=LARGEST + 1), numbers)


def test_the_parameter_chosen_takes_the_fewest_bits() -> None:
    rng = np.random.default_rng(0)
    for share in (0.9, 0.5, 0.1, 0.01, 0.001):
        gaps = rng.geometric(share, 2000) - 1
        _, bits = choose_parameter(gaps)
        assert bits == min(int((gaps >> k).sum()) + len(gaps) * (k + 1) for k in range(20))


def test_independent_gaps_take_little_more_than_their_entropy() -> None:
    share = 0.01
    gaps = np.random.default_rng(0).geometric(share, 20_000) - 1
    entropy = -(share * np.log2(share) + (1 - share) * np.log2(1 - share)) / share
    data, _ = written([gaps])
    assert 8 * len(data) / len(gaps) < entropy + 0.1


def test_another_number_of_codes_than_announced_is_refused() -> None:
    numbers = np.arange(50)
    data, [parameter] = written([numbers])
    for announced in (49, 51):
        with pytest.raises(CorruptDataError):
            RiceReader(
                PlaneReader(memoryview(data)), count=announced, num_low_bits=announced * parameter, max_zeros=10**6
            )


def test_numbers_beyond_their_limit_are_refused_before_they_overflow() -> None:
    numbers = np.array([3, 70])
    data, [parameter] = written([numbers])
    with pytest.raises(CorruptDataError, match="70 or more"):
        reader_of(data, [numbers], [parameter]).take(2, parameter, below=70)
    ends = np.zeros(8000, dtype=np.uint8)
    ends[-1] = 1
    far = pack_plane(np.packbits(ends, bitorder="little")) + pack_plane(np.zeros(8, np.uint8))
    reader = RiceReader(PlaneReader(memoryview(far)), count=1, num_low_bits=62, max_zeros=8000)
    with pytest.raises(CorruptDataError):
        reader.take(1, 62, below=1 << 20)


def test_more_zeros_than_there_can_be_are_refused() -> None:
    numbers = np.array([0] * 20_000 + [5000])
    data, [parameter] = written([numbers])
    with pytest.raises(CorruptDataError):
        reader_of(data, [numbers], [parameter], max_zeros=4000)


@given(st.integers(0, 2**35 - 1))
def test_varints_survive(value: int) -> None:
    reader = PlaneReader(memoryview(pack_varint(value)))
    assert reader.varint() == value
    assert reader.at_end


def test_a_varint_without_an_end_is_refused() -> None:
    for data in (b"\x80", b"\x80" * 9):
        with pytest.raises(CorruptDataError):
            PlaneReader(memoryview(data)).varint()
