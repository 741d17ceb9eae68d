"""Tickets open their own resource, as long as they are used."""

from __future__ import annotations

from typing import Any

import pytest

from services.common.errors import NotFoundError
from services.common.transfer import bulk
from services.common.transfer.bulk import Tickets
from tests.clock import Clock

SOURCE: Any = object()


def test_a_ticket_is_for_one_payload_and_no_two_are_alike() -> None:
    tickets = Tickets()
    first, second = tickets.give(SOURCE, "a"), tickets.give(SOURCE, "a")
    assert first != second
    assert tickets.use(first).payload_id == "a"
    with pytest.raises(NotFoundError):
        tickets.use(bytes(len(first)))


def test_a_ticket_expires_without_use_and_using_renews_it() -> None:
    clock = Clock()
    tickets = Tickets(10.0, clock)
    used, unused = tickets.give(SOURCE, "a"), tickets.give(SOURCE, "b")
    clock.now = 9.0
    tickets.use(used)
    clock.now = 11.0
    with pytest.raises(NotFoundError):
        tickets.use(unused)
    assert tickets.use(used).payload_id == "a"
    clock.now = 21.0
    with pytest.raises(NotFoundError):
        tickets.use(used)
    assert len(tickets) == 0


def test_the_number_of_tickets_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "MOST_TICKETS", 3)
    tickets = Tickets()
    given = [tickets.give(SOURCE, str(number)) for number in range(5)]
    assert len(tickets) == 3
    assert tickets.use(given[-1]).payload_id == "4"
    with pytest.raises(NotFoundError):
        tickets.use(given[0])
