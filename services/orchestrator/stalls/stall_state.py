"""State for stall detection: all time accounts, lost components and present stalls."""

from __future__ import annotations

from collections.abc import Callable

from services.common.telemetry.accounts import TimeAccount
from services.common.telemetry.components import ORCHESTRATOR, Component
from services.orchestrator.stalls.account_book import AccountBook
from services.orchestrator.stalls.detector import Stall


class StallState:
    def __init__(self, clock: Callable[[], float]) -> None:
        self.account = TimeAccount(ORCHESTRATOR, clock=clock)
        self.book = AccountBook()
        self.stalls: tuple[Stall, ...] = ()  # causes that block the run
        self.lost: dict[
            Component, float
        ] = {}  # components with a lost lease, and the time of the loss; until they return
