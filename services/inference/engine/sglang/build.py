"""Builds an engine from the settings of an inference service: stage, commands, servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from services.common.checkpoints.adapters import adapter_files
from services.common.config.processes.services import InferenceConfig
from services.common.errors import ConfigError
from services.common.weights.adapter import AdapterIdentity
from services.inference.engine.served.build import engine_of
from services.inference.engine.served.engine import ServedEngine
from services.inference.engine.served.environment import runs_on_cpu
from services.inference.engine.served.stage import Stage
from services.inference.engine.served.transfer import DiskTransfer, Transfer
from services.inference.engine.sglang.adapters import AdapterTransfer
from services.inference.engine.sglang.command import server_commands


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

    With ``adapter``, ``tensors`` are the adapter's, and ``model_path`` is its base.

    Starts no process. Raises ``ConfigError`` for settings that cannot work.
    """
    on_cpu = runs_on_cpu(config)
    if config.sglang.update == "broadcast" and not on_cpu:
        raise ConfigError("sglang.update: broadcast has been tried on CPUs only; write disk or tensors")
    commands = server_commands(
        config,
        name=f"sglang-{name}",
        model_path=model_path,
        context_length=context_length,
        number=number,
        gpus=gpus,
        on_cpu=on_cpu,
        adapter=adapter,
    )
    return engine_of(
        config,
        commands,
        lambda stage: _transfer(stage, config, model_path, adapter),
        name=name,
        model_path=model_path,
        context_length=context_length,
        tensors=tensors,
        directory=directory,
        version=version,
        on_tokens=on_tokens,
    )


def _transfer(stage: Stage, config: InferenceConfig, model_path: str, adapter: AdapterIdentity | None) -> Transfer:
    if adapter is not None:
        return AdapterTransfer(stage, adapter_files(adapter, model_path, config.dtype, {}))
    if config.sglang.update == "disk":
        return DiskTransfer(stage)
    if config.sglang.update == "tensors":
        from services.inference.engine.sglang.tensors import TensorTransfer  # needs torch, which `disk` does not

        return TensorTransfer(stage)
    from services.inference.engine.sglang.broadcast import BroadcastTransfer  # likewise

    return BroadcastTransfer(stage, config.sglang.tensor_parallel)
