"""A tiny model for true SGLang servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.random_models import build_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A random Qwen3 with its directory on disk as ``name_or_path``."""
    built = build_model("qwen3")
    path: Path = tmp_path_factory.mktemp("model")
    built.save_pretrained(path)
    built.name_or_path = str(path)
    return built
