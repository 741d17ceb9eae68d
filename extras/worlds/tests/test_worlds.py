"""Worlds that a config offers, and the messages about missing ones."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from services.common.config.envgateway import EnvGatewayConfig
from services.common.installing import install
from services.envgateway.envs.episodes import make_worlds


@pytest.mark.needs("alfworld", "textworld")
def test_a_world_that_cannot_be_offered_is_a_reason_that_names_the_setting(tmp_path: Path) -> None:
    assert "envgateway.alfworld.data" in str(make_worlds(EnvGatewayConfig())["alfworld"])
    missing = str(tmp_path / "none")
    listed = EnvGatewayConfig.model_validate({"alfworld": {"data": missing, "games": missing}})
    for setting in ("envgateway.alfworld.data: there is no folder", "envgateway.alfworld.games: there is no file"):
        assert f"{setting} {missing}" in str(make_worlds(listed)["alfworld"])
    config = EnvGatewayConfig.model_validate({"alfworld": {"data": missing}, "textworld": {"games": missing}})
    worlds = make_worlds(config)
    for name, setting in (("alfworld", "envgateway.alfworld.data"), ("textworld", "envgateway.textworld.games")):
        assert worlds[name] == f"{setting}: there is no folder {missing}"


def test_an_engine_that_is_not_installed_is_a_reason_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    worlds = make_worlds(EnvGatewayConfig())
    assert install("alfworld") in str(worlds["alfworld"])
    assert install("textworld") in str(worlds["textworld"])
