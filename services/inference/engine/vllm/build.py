"""Builds an engine over vLLM servers from the settings of an inference service."""

from __future__ import annotations

from services.inference.engine.served.build import ServedSetup, engine_of, read_model_config
from services.inference.engine.served.engine import ServedEngine
from services.inference.engine.served.environment import runs_on_cpu
from services.inference.engine.served.transfer import DiskTransfer
from services.inference.engine.vllm.command import server_commands


def build_engine(setup: ServedSetup) -> ServedEngine:
    """Starts no process. Raises ``ConfigError`` for settings that cannot work. The recipe refuses adapters."""
    assert setup.adapter is None
    commands = server_commands(
        setup.config,
        name=f"vllm-{setup.name}",
        model_path=setup.model_path,
        model_config=read_model_config(setup.model_path),
        context_length=setup.context_length,
        number=setup.number,
        gpus=setup.gpus,
        on_cpu=runs_on_cpu(setup.config),
    )
    return engine_of(setup, commands, DiskTransfer)
