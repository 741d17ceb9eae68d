"""Fixtures: times of the index."""

from __future__ import annotations

import pytest

from services.orchestrator.journal import index


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "LOCK_S", 0.01)
    monkeypatch.setattr(index, "OPEN_S", 0.01)
    monkeypatch.setattr(index, "RETRY_S", 0.01)
    monkeypatch.setattr(index, "FLUSH_S", 0.0)  # each commit is a transaction
    monkeypatch.setattr("services.orchestrator.journal.reader.LOCK_S", 0.01)
