"""Fixtures: times of the index."""

from __future__ import annotations

import pytest

from services.orchestrator.journal.storage import index_keeper as keeper


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "LOCK_S", 0.01)
    monkeypatch.setattr(keeper, "OPEN_S", 0.01)
    monkeypatch.setattr(keeper, "RETRY_S", 0.01)
    monkeypatch.setattr(keeper, "FLUSH_S", 0.0)  # each commit is a transaction
    monkeypatch.setattr("services.orchestrator.journal.reader.LOCK_S", 0.01)
