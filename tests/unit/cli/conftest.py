"""Checks of recipes without the trials of their models, which take seconds each and are in test_wrong_inputs."""

from __future__ import annotations

import pytest

from services.cli.check import recipe


@pytest.fixture(autouse=True)
def no_model_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "model_trials", lambda _: ([], []))
