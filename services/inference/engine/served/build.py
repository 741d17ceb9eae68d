"""Builds an engine over servers: stage, processes, fleet. A program's ``build`` gives the commands and the transfer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.config.processes.services import InferenceConfig
from services.common.errors import ConfigError
from services.common.weights.snapshot import AdapterIdentity
from services.inference.engine.base import KvPolicy
from services.inference.engine.served.engine import ServedEngine
from services.inference.engine.served.process import ServerCommand, ServerProcess
from services.inference.engine.served.server import Server
from services.inference.engine.served.stage import Stage, place_stage, size_of
from services.inference.engine.served.transfer import Transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedSetup:
    """The input of every engine over servers, the same for SGLang and vLLM."""

    config: InferenceConfig
    name: str
    """In the names of logs and of the stage."""
    model_path: str
    """The base model where there is an ``adapter``."""
    context_length: int
    tensors: Mapping[str, Any]
    """Host tensors of version 0 by Hugging Face name, in the published type; those of the adapter if there is one."""
    directory: Path
    """Logs are in its folder ``logs``."""
    number: int = 1
    """Servers that share the load."""
    gpus: Sequence[str] = ()
    """GPUs of these servers alone; empty for all visible GPUs."""
    on_tokens: Callable[[int, float], None] | None = None
    adapter: AdapterIdentity | None = None


def engine_of(
    setup: ServedSetup, commands: Sequence[ServerCommand], transfer: Callable[[Stage], Transfer]
) -> ServedEngine:
    """An engine over the servers of ``commands``. Starts no process.

    Raises ``ConfigError`` if no place has room for the stage.
    """
    config, directory = setup.config, setup.directory
    settings = config.servers
    assert settings is not None
    size_bytes = size_of(setup.tensors)
    place = place_stage(settings.stage_directory, directory / "stage", setup.name, size_bytes)
    stage = Stage(place, setup.tensors, 0)
    kv_policy = KvPolicy(config.kv_policy)
    slots = config.engine_slots or config.num_slots
    ceiling = min(settings.max_running_requests or slots, slots)
    servers = [
        Server(
            index,
            ServerProcess(command, directory / "logs" / f"{command.name}.log", settings.loading_timeout_s(size_bytes)),
            kv_policy,
            ceiling,
        )
        for index, command in enumerate(commands)
    ]
    return ServedEngine(
        servers,
        stage,
        transfer(stage),
        context_length=setup.context_length,
        vocab_size=_vocab_size(setup.model_path),
        kv_policy=kv_policy,
        restarts=settings.restarts,
        stall_timeout_s=settings.stall_timeout_s,
        chunk_tokens=settings.chunk_tokens,
        on_tokens=setup.on_tokens,
    )


def read_model_config(model_path: str) -> Mapping[str, Any]:
    """The part of a model's ``config.json`` that describes its text; empty if the file is not on this disk.

    ``ConfigError`` for a directory without a readable file.
    """
    path = Path(model_path)
    if not path.is_absolute() and not path.is_dir():
        return {}
    try:
        read = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{model_path}: no model that can be read there: {error}") from error
    return {**read.get("text_config", {}), **read}


def _vocab_size(model_path: str) -> int | None:
    found = read_model_config(model_path).get("vocab_size")
    return found if isinstance(found, int) else None
