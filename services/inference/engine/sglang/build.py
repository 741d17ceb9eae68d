"""Builds an engine from the settings of an inference service: stage, commands, servers."""

from __future__ import annotations

from services.common.errors import ConfigError
from services.common.export import adapter_files
from services.inference.engine.served.build import ServedSetup, engine_of
from services.inference.engine.served.engine import ServedEngine
from services.inference.engine.served.environment import runs_on_cpu
from services.inference.engine.served.stage import Stage
from services.inference.engine.served.transfer import DiskTransfer, Transfer
from services.inference.engine.sglang.adapters import AdapterTransfer
from services.inference.engine.sglang.command import server_commands


def build_engine(setup: ServedSetup) -> ServedEngine:
    """Starts no process. Raises ``ConfigError`` for settings that cannot work."""
    config = setup.config
    on_cpu = runs_on_cpu(config)
    if config.sglang.update == "broadcast" and not on_cpu:
        raise ConfigError("sglang.update: broadcast has been tried on CPUs only; write disk or tensors")
    commands = server_commands(
        config,
        name=f"sglang-{setup.name}",
        model_path=setup.model_path,
        context_length=setup.context_length,
        number=setup.number,
        gpus=setup.gpus,
        on_cpu=on_cpu,
        adapter=setup.adapter,
    )
    return engine_of(setup, commands, lambda stage: _transfer(stage, setup))


def _transfer(stage: Stage, setup: ServedSetup) -> Transfer:
    config = setup.config
    if setup.adapter is not None:
        return AdapterTransfer(stage, adapter_files(setup.adapter, setup.model_path, config.dtype, {}))
    if config.sglang.update == "disk":
        return DiskTransfer(stage)
    if config.sglang.update == "tensors":
        from services.inference.engine.sglang.tensors import TensorTransfer  # needs torch, which `disk` does not

        return TensorTransfer(stage)
    from services.inference.engine.sglang.broadcast import BroadcastTransfer  # likewise

    return BroadcastTransfer(stage, config.sglang.tensor_parallel)
