"""``transfer: auto`` takes the cheaper payload by measured rates, and codes no delta that no receiver fetches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.weights.manifest import Encoding, ReceiverRates
from services.trainer.publish.publisher_store import MeasuredRates, TransferChoice

GB = 10**9


def measured(*, link: float, decode: float = 2.0 * GB, code_s: float = 1.0, share: float = 0.1) -> TransferChoice:
    """``code_s`` for each GB of the version."""
    choice = TransferChoice()
    choice.note_receiver(ReceiverRates(link=link, decode=decode))
    choice.note_delta(size_bytes=int(share * GB), full_bytes=GB, code_s=code_s)
    return choice


def test_a_receiver_on_the_host_maps_the_snapshot_at_any_rate() -> None:
    for choice in (TransferChoice(), measured(link=1e6)):
        chosen = choice.choose(1, GB, can_map=True, is_ready=True)
        assert (chosen.encoding, chosen.reason) == (Encoding.FULL, "mapped on one host")
        assert not choice.codes_in_advance(2), "no receiver fetches a delta"


@pytest.mark.parametrize(("link", "encoding"), [(1e8, Encoding.DELTA), (2e10, Encoding.FULL)])
def test_a_slow_link_gets_the_delta_and_a_fast_one_the_snapshot(link: float, encoding: Encoding) -> None:
    choice = measured(link=link)
    chosen = choice.choose(3, 16 * GB, can_map=False, is_ready=False)
    assert chosen.encoding is encoding
    assert chosen.reason.startswith(f"{encoding.value}: delta ")
    assert choice.codes_in_advance(4) == (encoding is Encoding.DELTA)


def test_without_measurements_the_delta_is_chosen_because_it_measures() -> None:
    choice = TransferChoice()
    assert choice.choose(1, GB, can_map=False, is_ready=False).reason == "delta, rates not measured"
    choice.note_receiver(ReceiverRates())  # a receiver that has fetched nothing yet
    assert choice.choose(2, GB, can_map=False, is_ready=False).encoding is Encoding.DELTA


def test_receivers_of_one_version_get_one_choice() -> None:
    choice = measured(link=1e8)
    first = choice.choose(3, GB, can_map=False, is_ready=False)
    choice.note_receiver(ReceiverRates(link=1e12))
    assert choice.choose(3, GB, can_map=False, is_ready=False) == first
    assert choice.choose(4, GB, can_map=False, is_ready=False).encoding is Encoding.FULL


def test_coding_in_advance_ends_some_versions_after_the_last_receiver() -> None:
    choice = measured(link=1e8)
    assert not choice.codes_in_advance(1), "no receiver has asked yet"
    choice.choose(1, GB, can_map=False, is_ready=False)
    coded = [version for version in range(2, 12) if choice.codes_in_advance(version)]
    assert coded == [2, 3, 4, 5]


@given(
    rates=st.builds(
        MeasuredRates,
        code_s_per_byte=st.floats(1e-11, 1e-7),
        delta_share=st.floats(0, 1),
        link=st.floats(1e6, 1e11),
        decode=st.floats(1e8, 1e11),
    ),
    size=st.integers(1, 10**12),
    is_ready=st.booleans(),
)
def test_the_choice_is_the_cheaper_one_and_a_coded_delta_is_never_dearer(
    rates: MeasuredRates, size: int, is_ready: bool
) -> None:
    choice = TransferChoice()
    choice.rates = rates
    costs = rates.costs_s(size, is_ready=is_ready)
    assert costs is not None
    delta_s, full_s = costs
    chosen = choice.choose(1, size, can_map=False, is_ready=is_ready)
    assert (chosen.encoding is Encoding.DELTA) == (delta_s <= full_s)
    ready, later = (rates.costs_s(size, is_ready=now) for now in (True, False))
    assert ready is not None and later is not None and ready[0] <= later[0]
