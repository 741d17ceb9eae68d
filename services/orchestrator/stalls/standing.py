"""Where the run stands as far as time goes: everybody's accounts, who is missed, and what stands still now."""

from __future__ import annotations

from collections.abc import Callable

from services.common.accounts import TimeAccount
from services.orchestrator.stalls.book import AccountBook
from services.orchestrator.stalls.detector import Stall


class Standing:
    def __init__(self, clock: Callable[[], float]) -> None:
        self.account = TimeAccount("orchestrator", clock=clock)
        self.book = AccountBook()
        self.stalls: tuple[Stall, ...] = ()  # what keeps the run from going on
        self.lost: dict[str, float] = {}  # components whose lease ran out, and when; until they are back
