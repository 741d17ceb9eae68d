"""A model directory of another author: a pickle among its files is never executed."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import ConfigError
from services.common.text.chat import load_model
from tests.unit.trainer.building import tiny_causal_lm


class Payload:
    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.system, (f"touch {self._mark}",)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_weights_that_are_a_pickle_are_refused_and_not_executed(name: str, tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    directory = tmp_path / "model"
    tiny_causal_lm().save_pretrained(directory)
    (directory / "model.safetensors").unlink()
    (directory / name).write_bytes(pickle.dumps({"weight": Payload(mark)}))
    with pytest.raises(ConfigError, match="cannot load a causal language model"):
        load_model(directory)
    assert not mark.exists()
