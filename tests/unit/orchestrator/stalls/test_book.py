"""The account book keeps the time of every incarnation of a component, and its shares sum to one."""

from __future__ import annotations

import pytest

from services.common.telemetry.accounts import AccountState, ActivityTime
from services.orchestrator.stalls import WINDOW_S, AccountBook


def trainer(training_s: float, waiting_s: float) -> AccountState:
    return AccountState(
        component="trainer/model0",
        activities=(
            ActivityTime(name="training", seconds=training_s),
            ActivityTime(name="waiting for a batch", on="orchestrator", seconds=waiting_s),
        ),
    )


def test_a_component_that_was_started_again_keeps_what_its_earlier_life_booked() -> None:
    book = AccountBook()
    book.note([trainer(2.0, 6.0)])
    book.note([trainer(3.0, 7.0)])
    book.note([trainer(0.5, 0.5)])  # a new process
    book.note([trainer(1.0, 1.0)])
    assert book.summary() == {"trainer/model0": {"waiting for a batch -> orchestrator": 0.6667, "training": 0.3333}}
    assert book.waits() == {"trainer/model0": {"": 0.3333, "orchestrator": 0.6667}}


def test_the_share_of_the_present_forgets_what_is_long_over() -> None:
    book = AccountBook()
    waiting = 0.0
    assert book.share_lately(lambda name: True, lambda activity: True) is None
    for second in range(200):
        waiting += 0.0 if second < 100 else 1.0
        book.note([trainer(second + 1 - waiting, waiting)])
        book.mark(float(second))
    assert book.share_lately(lambda name: True, lambda activity: bool(activity.on)) == pytest.approx(1.0)
    assert len(book._marks) <= WINDOW_S + 2
