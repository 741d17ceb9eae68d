"""From the settings of an inference service to an engine that can be started: stage, commands, servers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from services.common.config.services import InferenceConfig
from services.common.errors import ConfigError
from services.inference.engine.base import KvPolicy
from services.inference.engine.sglang.command import server_commands
from services.inference.engine.sglang.engine import SglangEngine
from services.inference.engine.sglang.environment import runs_on_cpu
from services.inference.engine.sglang.process import ServerProcess
from services.inference.engine.sglang.server import Server
from services.inference.engine.sglang.stage import Stage, place_stage, size_of
from services.inference.engine.sglang.transfer import FromDisk, Transfer


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
) -> SglangEngine:
    """``name`` is in the names of logs and stage; ``tensors`` are the host tensors of ``version`` by Hugging Face name, in
    the published type; ``number`` servers share the load, on ``gpus`` of their own. Logs go to ``directory``/logs.

    Starts nothing. Raises ``ConfigError`` for settings that cannot work.
    """
    on_cpu = runs_on_cpu(config)
    if config.sglang.update == "broadcast" and not on_cpu:
        raise ConfigError("sglang.update: broadcast has been tried on CPUs only; write disk")
    commands = server_commands(
        config,
        name=f"sglang-{name}",
        model_path=model_path,
        context_length=context_length,
        number=number,
        gpus=gpus,
        on_cpu=on_cpu,
    )
    settings = config.sglang
    place = place_stage(settings.stage_directory, directory / "sglang-stage", name, size_of(tensors))
    stage = Stage(place, tensors, version)
    kv_policy = KvPolicy(config.kv_policy)
    slots = config.engine_slots or config.num_slots
    ceiling = min(settings.max_running_requests or slots, slots)
    servers = [
        Server(
            index,
            ServerProcess(command, directory / "logs" / f"{command.name}.log", settings.ready_timeout_s),
            kv_policy,
            ceiling,
        )
        for index, command in enumerate(commands)
    ]
    return SglangEngine(
        servers,
        stage,
        FromDisk(stage) if settings.update == "disk" else _broadcast(stage, settings.tensor_parallel),
        context_length=context_length,
        vocab_size=_vocab_size(model_path),
        kv_policy=kv_policy,
        restarts=settings.restarts,
        stall_timeout_s=settings.stall_timeout_s,
        chunk_tokens=settings.chunk_tokens,
        on_tokens=on_tokens,
    )


def _broadcast(stage: Stage, num_ranks: int) -> Transfer:
    from services.inference.engine.sglang.broadcast import ByBroadcast  # needs torch, which `disk` does not

    return ByBroadcast(stage, num_ranks)


def _vocab_size(model_path: str) -> int | None:
    """None when the config is not on this disk, or does not say."""
    path = Path(model_path)
    if not path.is_absolute() and not path.is_dir():
        return None
    try:
        read = json.loads((path / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{model_path}: no model that can be read there: {error}") from error
    found = read.get("vocab_size", read.get("text_config", {}).get("vocab_size"))
    return found if isinstance(found, int) else None
