"""The command line and environment of SGLang servers, from the settings of an inference service. Starts nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from services.common.config.services import InferenceConfig
from services.common.config.sglang import MASK_TOKENS
from services.common.errors import ConfigError
from services.inference.engine.sglang.environment import interpreter

CONTEXT_MARGIN = 8  # tokens that a server keeps for itself at the end of its context
CPU_CACHE_TOKENS = 65536  # most tokens of a KV cache in host memory
_ENGINES = Path(__file__).resolve().parent.parent
_CPU_LAUNCHER = _ENGINES / "sglang_cpu" / "launch.py"
_CPU_MEMORY_SHARE = 0.1
_ON_CPU: dict[str, str | int | float | bool] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "sleep_on_idle": True,
}
OURS = (
    "model_path",
    "host",
    "port",
    "tp_size",
    "weight_version",
    "skip_tokenizer_init",
    "incremental_streaming_output",
)
"""Arguments that are never taken from `extra_arguments`: the engine relies on its own values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCommand:
    """How one server is started; ``argv`` lacks its port, which is a free one of each start."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


def server_commands(
    config: InferenceConfig,
    *,
    name: str,
    model_path: str,
    context_length: int,
    number: int,
    gpus: Sequence[str],
    on_cpu: bool,
    environment: Mapping[str, str] = os.environ,
) -> list[ServerCommand]:
    """``number`` data-parallel servers of one policy; ``gpus`` are theirs alone, empty for whatever they see.

    Raises:
        ConfigError: an extra argument that is not the recipe's to set, or fewer GPUs than the servers need.
    """
    settings = config.sglang
    parallel = settings.tensor_parallel
    if gpus and len(gpus) < number * parallel:
        raise ConfigError(f"{number} SGLang engines of {parallel} GPUs need {number * parallel}, but have {len(gpus)}")
    if mistaken := [key for key in settings.extra_arguments if _plain(key) in OURS]:
        raise ConfigError(
            f"sglang.extra_arguments names {', '.join(mistaken)}, which Millrace sets itself: leave it out"
        )
    most_running = settings.max_running_requests or config.engine_slots or config.num_slots
    arguments: dict[str, str | int | float | bool] = {
        "model_path": model_path,
        "tp_size": parallel,
        "dtype": config.dtype,
        "context_length": context_length + CONTEXT_MARGIN,
        "mem_fraction_static": _CPU_MEMORY_SHARE if on_cpu else settings.memory_share,
        "max_running_requests": most_running,
        "sampling_mask_max_tokens": MASK_TOKENS,
        "skip_tokenizer_init": True,
        "incremental_streaming_output": True,
        "log_level": "warning",
    }
    if config.kv_policy == "keep":
        # Paused in place with two steps in flight, a server would name the new version for a token of the old one.
        arguments["disable_overlap_schedule"] = True
    if on_cpu:
        arguments |= _ON_CPU
        arguments["max_total_tokens"] = min(CPU_CACHE_TOKENS, most_running * (context_length + CONTEXT_MARGIN))
    arguments |= {_plain(key): value for key, value in settings.extra_arguments.items()}
    launcher = [str(_CPU_LAUNCHER)] if on_cpu else ["-m", "sglang.launch_server"]
    argv = (interpreter(settings.python, environment), *launcher, *_spelled(arguments), "--host", "127.0.0.1")
    cores = sorted(os.sched_getaffinity(0))
    commands = []
    for index in range(number):
        env = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1", "TOKENIZERS_PARALLELISM": "false"}
        if settings.update == "broadcast":
            env["GLOO_SOCKET_IFNAME"] = "lo"  # the group that weights come by is this machine's business
        if Path(model_path).is_dir():
            env["HF_HUB_OFFLINE"] = "1"
        if gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[index * parallel : (index + 1) * parallel])
        if on_cpu:
            env |= {"OMP_NUM_THREADS": str(config.threads), "SGLANG_CPU_OMP_THREADS_BIND": _bound(config, index, cores)}
        commands.append(ServerCommand(name=f"{name}-{index}", argv=argv, env=env))
    return commands


def _plain(key: str) -> str:
    return key.lstrip("-").replace("-", "_")


def _spelled(arguments: Mapping[str, str | int | float | bool]) -> list[str]:
    words: list[str] = []
    for key, value in arguments.items():
        option = "--" + key.replace("_", "-")
        if isinstance(value, bool):
            words += [option] if value else []
        else:
            words += [option, str(value)]
    return words


def _bound(config: InferenceConfig, index: int, cores: Sequence[int]) -> str:
    """Cores of each rank, from the last one down: SGLang wants them named, and they must exist."""
    ranks = range(index * config.sglang.tensor_parallel, (index + 1) * config.sglang.tensor_parallel)
    per_rank = min(config.threads, len(cores))
    groups = [[cores[-1 - (rank * per_rank + i) % len(cores)] for i in range(per_rank)] for rank in ranks]
    return "|".join(",".join(map(str, sorted(group))) for group in groups)
