"""Builds an engine over vLLM servers from the settings of an inference service."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from services.common.config.processes.services import InferenceConfig
from services.common.weights.adapter import AdapterIdentity
from services.inference.engine.served.build import engine_of, read_model_config
from services.inference.engine.served.engine import ServedEngine
from services.inference.engine.served.environment import runs_on_cpu
from services.inference.engine.served.transfer import DiskTransfer
from services.inference.engine.vllm.command import server_commands


def build_engine(
    config: InferenceConfig,
    *,
    name: str,
    model_path: str,
    context_length: int,
    tensors: Mapping[str, Any],
    directory: Path,
    version: int = 0,
    number: int = 1,
    gpus: Sequence[str] = (),
    on_tokens: Callable[[int, float], None] | None = None,
    adapter: AdapterIdentity | None = None,
) -> ServedEngine:
    """``name`` is in the names of logs and stage; ``tensors`` are the host tensors of ``version`` by Hugging Face name, in
    the published type; ``number`` servers share the load, on ``gpus`` of their own. Logs go to ``directory``/logs.

    Starts no process. Raises ``ConfigError`` for settings that cannot work. The recipe refuses adapters.
    """
    assert adapter is None
    commands = server_commands(
        config,
        name=f"vllm-{name}",
        model_path=model_path,
        model_config=read_model_config(model_path),
        context_length=context_length,
        number=number,
        gpus=gpus,
        on_cpu=runs_on_cpu(config),
    )
    return engine_of(
        config,
        commands,
        DiskTransfer,
        name=name,
        model_path=model_path,
        context_length=context_length,
        tensors=tensors,
        directory=directory,
        version=version,
        on_tokens=on_tokens,
    )
