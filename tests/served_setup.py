"""The input of an engine over servers, for tests of command lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from services.common.config.processes import InferenceConfig
from services.common.weights.snapshot import AdapterIdentity
from services.inference.engine.served.engine import ServedSetup


def setup_of(
    engine: str,
    number: int = 1,
    gpus: tuple[str, ...] = (),
    on_cpu: bool = False,
    adapter: AdapterIdentity | None = None,
    **settings: Any,
) -> ServedSetup:
    """``settings`` of the inference service."""
    device = "cpu" if on_cpu else "cuda"
    given = {"engine": engine, "dtype": "bfloat16", "device": device, **settings}
    return ServedSetup(
        config=InferenceConfig.model_validate(given),
        name="a-model0",
        model_path="Qwen/Qwen3-8B",
        context_length=16384,
        tensors={},
        directory=Path("/nowhere"),
        number=number,
        gpus=gpus,
        adapter=adapter,
    )
