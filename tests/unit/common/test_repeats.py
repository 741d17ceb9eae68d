from __future__ import annotations

from services.common.telemetry.logs import Repeats


def test_of_one_kind_one_is_told_in_a_second_with_how_many_were_not() -> None:
    now = 0.0
    repeats = Repeats(clock=lambda: now)
    assert [repeats.tell("GetRun", "expired") for _ in range(4)] == [{}, None, None, None]
    assert repeats.tell("GetRun", "malformed") == {}
    now = 1.5
    assert repeats.tell("GetRun", "expired") == {"and_before": 3}
    now = 3.0
    assert repeats.tell("GetRun", "expired") == {}
