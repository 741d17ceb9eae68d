"""When a decoding step is due: later while company is expected, at once for a lone caller, never later than the bounds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.inference.engine.torch.slots import LINGER_S, Gathering

ROUNDING = 1e-9  # of differences of times


def after_decoding(rows: int, seconds: float) -> Gathering:
    """A gate with ``rows`` rows and one step, which ended at time 100."""
    gathering = Gathering()
    assert gathering.holds_s(rows, 0, 100.0 - seconds) == 0
    gathering.decoded(100.0 - seconds, 100.0)
    return gathering


def test_the_first_request_of_all_and_a_lone_caller_are_never_held() -> None:
    assert Gathering().holds_s(1, 0, 5.0) == 0
    assert after_decoding(1, 0.5).holds_s(1, 0, 100.001) == 0


def test_a_step_waits_for_half_of_the_rows_that_lately_were() -> None:
    gathering = after_decoding(20, 0.5)
    assert gathering.holds_s(1, 0, 100.001) > 0
    assert gathering.holds_s(4, 5, 100.002) > 0
    assert gathering.holds_s(5, 5, 100.003) == 0


def test_no_step_is_held_longer_than_decoding_took_or_than_the_bound() -> None:
    for seconds, bound in ((0.01, 0.01), (3.0, LINGER_S)):
        gathering = after_decoding(20, seconds)
        assert 0 < gathering.holds_s(1, 0, 100.5) <= bound + ROUNDING
        assert gathering.holds_s(2, 0, 100.5 + bound + ROUNDING) == 0


@given(st.lists(st.integers(0, 60), min_size=1, max_size=30))
def test_all_holds_together_take_no_longer_than_decoding_did(rows: list[int]) -> None:
    gathering, now, held, decoded = after_decoding(64, 0.02), 100.0, 0.0, 0.02
    for count in rows:
        while (left := gathering.holds_s(count, 1, now)) > 0:
            held += left
            now += left + ROUNDING
        gathering.decoded(now, now + 0.004)
        now, decoded = now + 0.004, decoded + 0.004
    assert held <= decoded + 30 * ROUNDING


def test_waiting_in_vain_halves_what_the_next_step_waits_for() -> None:
    gathering = after_decoding(20, 0.5)
    now = 100.0
    for rows in (9, 3, 0):
        assert gathering.holds_s(0, rows, now) > 0
        now += LINGER_S + ROUNDING
        assert gathering.holds_s(0, rows, now) == 0
        gathering.decoded(now, now + 1.0)
        now += 1.0
        assert gathering.holds_s(0, (rows + 1) // 2, now) == 0
