"""`rollmill check` says of a model the words with which the run would end."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import transformers

from services.cli.check import models as trials
from services.cli.check.models import model_trials
from tests.unit.trainer_service.building import recipe, save_model


def configured(folder: Path, kind: str, **settings: Any) -> Any:
    """A recipe whose model directory holds the config of a big model and no weights."""
    getattr(transformers, f"{kind}Config")(**settings).save_pretrained(folder)
    return recipe(folder)


@pytest.mark.slow
def test_a_big_model_is_tried_by_its_config_alone_and_a_refusal_is_that_of_the_run(tmp_path: Path) -> None:
    """The trainer takes it, and the engine does not. Other refusals: tests/unit/inference/test_engine_models and tests/unit/trainer/test_self_test."""
    problems, notes = model_trials(configured(tmp_path / "model", "Mistral"))
    (problem,) = problems
    assert not notes and "the torch engine cannot run this model: model_type is 'mistral'" in problem


def test_a_model_that_cannot_be_tried_is_told_and_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(command: Any, **_: Any) -> None:
        raise subprocess.TimeoutExpired(command, 1.0)

    monkeypatch.setattr(trials.subprocess, "run", late)
    problems, notes = model_trials(recipe(save_model(tmp_path / "model")))
    assert not problems and all("could not be tried" in note for note in notes) and notes
