"""Tickets: random, for one payload, for a while. Who holds one may read that payload over the bulk socket."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from services.common.errors import NotFoundError
from services.common.transfer.bulk_frames import TICKET_BYTES
from services.common.transfer.source import PayloadSource

TICKET_S = 60.0  # without use
MOST_TICKETS = 4096  # the oldest unused goes first


@dataclass(slots=True)
class Ticket:
    """What its bearer may read."""

    source: PayloadSource
    payload_id: str
    expires_at: float


class Tickets:
    """Those given out and not expired."""

    def __init__(self, lifetime_s: float = TICKET_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._lifetime_s = lifetime_s
        self._clock = clock
        self._tickets: OrderedDict[bytes, Ticket] = OrderedDict()  # the one that expires first comes first

    def give(self, source: PayloadSource, payload_id: str) -> bytes:
        """A ticket for one payload."""
        self._drop_expired()
        while len(self._tickets) >= MOST_TICKETS:
            self._tickets.popitem(last=False)
        secret = secrets.token_bytes(TICKET_BYTES)
        self._tickets[secret] = Ticket(source, payload_id, self._clock() + self._lifetime_s)
        return secret

    def use(self, secret: bytes) -> Ticket:
        """What the ticket is for; using it renews it. Raises ``NotFoundError`` for a wrong or expired one."""
        self._drop_expired()
        ticket = self._tickets.get(secret)
        if ticket is None:
            raise NotFoundError("the ticket is unknown or has expired: ask for the manifest again")
        ticket.expires_at = self._clock() + self._lifetime_s
        self._tickets.move_to_end(secret)
        return ticket

    def __len__(self) -> int:
        return len(self._tickets)

    def _drop_expired(self) -> None:
        now = self._clock()
        while self._tickets and next(iter(self._tickets.values())).expires_at <= now:
            self._tickets.popitem(last=False)
