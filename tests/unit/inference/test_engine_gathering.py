"""When a decoding step is due: later while company is expected, at once for a lone caller, never later than the bounds."""

from __future__ import annotations

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
