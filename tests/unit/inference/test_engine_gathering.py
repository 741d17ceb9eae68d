"""When a decoding step is due: later while company is expected, at once for a lone caller, never later than the bounds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.inference.engine.torch.slots import JOIN_STEPS, LINGER_S, MEMORY_S, Gathering

ROUNDING = 1e-9  # of differences of times


def after_decoding(rows: int, seconds: float) -> Gathering:
    """A gate with ``rows`` rows and one step, which ended at time 100."""
    gathering = Gathering()
    assert gathering.holds_s(rows, 0, 100.0 - seconds) == 0
    gathering.decoded(100.0 - seconds, 100.0)
    return gathering


def test_a_quarter_as_many_as_the_rows_that_decode_join_at_once() -> None:
    assert not Gathering().joins(1, 8, room=56)
    assert Gathering().joins(2, 8, room=56)


def test_what_finds_no_room_does_not_count() -> None:
    assert not Gathering().joins(40, 60, room=4)
    assert not Gathering().joins(40, 64, room=0)


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 64), st.integers(1, 64)), min_size=JOIN_STEPS + 1))
def test_a_request_that_has_room_waits_at_most_so_many_steps(counts: list[tuple[int, int, int]]) -> None:
    gathering = Gathering()
    joined = [gathering.joins(*count) for count in counts]
    for start in range(len(joined) - JOIN_STEPS):
        assert any(joined[start : start + JOIN_STEPS + 1])


def test_the_first_request_of_all_and_a_lone_caller_are_never_held() -> None:
    assert Gathering().holds_s(1, 0, 5.0) == 0
    assert after_decoding(1, 0.5).holds_s(1, 0, 100.001) == 0


def test_a_step_waits_for_half_of_the_rows_that_lately_were() -> None:
    gathering = after_decoding(20, 0.5)
    assert gathering.holds_s(1, 0, 100.001) > 0
    assert gathering.holds_s(4, 5, 100.002) > 0
    assert gathering.holds_s(5, 5, 100.003) == 0


def test_what_a_held_step_waited_for_joins_it() -> None:
    gathering = after_decoding(40, 0.5)
    assert gathering.holds_s(0, 18, 100.001) > 0
    assert gathering.holds_s(2, 18, 100.002) == 0
    assert gathering.joins(2, 18, room=40)


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


def test_rows_that_decoded_long_ago_are_forgotten() -> None:
    assert after_decoding(20, 0.5).holds_s(1, 0, 100.0 + MEMORY_S + ROUNDING) == 0


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
