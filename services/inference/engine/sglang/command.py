"""Builds the command line and environment of SGLang servers from an inference service's settings. Starts no process.

Also the program's part of a running server: its arguments for port, version and key, and remedies for its failures."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from services.common.config.processes.servers import MASK_TOKENS
from services.common.config.processes.services import InferenceConfig
from services.common.errors import ConfigError
from services.common.weights.snapshot import AdapterIdentity
from services.inference.engine import sglang_cpu
from services.inference.engine.served.environment import bound_cores, interpreter, own_arguments, seen_device, spelled
from services.inference.engine.served.process import PORTS_TRIED, Program, ServerCommand
from services.inference.engine.sglang.adapters import LOADED_AT_ONCE
from services.inference.engine.sglang.client import SglangClient

CONTEXT_MARGIN = 8  # tokens that a server keeps for itself at the end of its context
CPU_CACHE_TOKENS = 65536  # most tokens of a KV cache in host memory
_CPU_LAUNCHER = Path(sglang_cpu.__file__).resolve().with_name("launch.py")
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
    "enable_lora",
    "lora_paths",
    "lora_target_modules",
    "max_lora_rank",
    "max_loaded_loras",
    "max_loras_per_batch",
    "skip_tokenizer_init",
    "incremental_streaming_output",
)

HINTS = (
    (
        r"No module named ['\"]?sglang",
        "this interpreter has no SGLang: run `make sglang-env` (sglang-cpu-env for CPUs), or name one that has it with sglang.python or ROLLMILL_SGLANG_PYTHON",
    ),
    (
        r"unrecognized arguments?:? .*|invalid choice: .*|argument --\S+: .*",
        "SGLang does not know an argument: correct sglang.extra_arguments",
    ),
    (
        r"out of memory|OutOfMemoryError|Not enough memory|mem-fraction-static|Cannot allocate memory",
        "too little memory: raise sglang.memory_share if the GPU is free, lower it if other processes use the GPU, raise "
        "sglang.tensor_parallel, or lower policies.<name>.model.context_length or sglang.max_running_requests",
    ),
    (
        r"invalid device ordinal|No CUDA GPUs are available|no CUDA-capable device|CUDA driver|Invalid GPU id",
        "no such GPU here: correct inference.<name>.gpus (`nvidia-smi -L` lists them)",
    ),
    (
        r"no file named config\.json|Incorrect path_or_model_id|is not a local folder|Repo id must be|Can't load the "
        r"configuration|does not appear to have a file named|Cannot find any model weights|Unrecognized model",
        "the model path holds no model that SGLang can read: correct policies.<name>.model.path",
    ),
    (r"[Aa]ddress already in use", f"ports were taken meanwhile, {PORTS_TRIED} times in a row"),
)


def _arguments(port: int, version: int, key_file: Path) -> tuple[str, ...]:
    return ("--port", str(port), "--weight-version", str(version), "--config", str(key_file))


def sglang_program(devices: Sequence[str]) -> Program:
    """``devices`` of a server's ranks, in torch's notation, as this process sees them."""
    return Program(
        name="SGLang",
        section="sglang",
        connect=partial(SglangClient, devices=devices),
        arguments=_arguments,
        hints=HINTS,
        port_taken=re.compile(r"error while attempting to bind on address .*already in use"),
    )


"""Arguments that are never taken from `extra_arguments`: the engine relies on its own values."""


def server_commands(
    config: InferenceConfig,
    *,
    name: str,
    model_path: str,
    context_length: int,
    number: int,
    gpus: Sequence[str],
    on_cpu: bool,
    adapter: AdapterIdentity | None = None,
    environment: Mapping[str, str] = os.environ,
) -> list[ServerCommand]:
    """Commands of ``number`` data-parallel servers of one policy; ``gpus`` are theirs alone, empty for all visible GPUs.

    Raises:
        ConfigError: an extra argument that is not the recipe's to set, or fewer GPUs than the servers need.
    """
    settings = config.sglang
    parallel = settings.tensor_parallel
    if gpus and len(gpus) < number * parallel:
        raise ConfigError(f"{number} SGLang engines of {parallel} GPUs need {number * parallel}, but have {len(gpus)}")
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
        # With two steps in flight at a pause in place, a server would report the new version for a token of the old one.
        arguments["disable_overlap_schedule"] = True
    if adapter is not None:
        arguments |= {
            "enable_lora": True,
            "max_lora_rank": adapter.rank,
            "max_loras_per_batch": LOADED_AT_ONCE + 1,  # and calls without an adapter, which check the server
        }
    if not on_cpu:
        # Log-probabilities of bf16 logits are off by up to .03, which the ratio of a loss would take for staleness.
        arguments["enable_fp32_lm_head"] = True
    if on_cpu:
        arguments |= _ON_CPU
        if adapter is not None:
            arguments["lora_backend"] = "torch_native"
        arguments["max_total_tokens"] = min(CPU_CACHE_TOKENS, most_running * (context_length + CONTEXT_MARGIN))
    arguments |= own_arguments("sglang", settings.extra_arguments, OURS)
    launcher = [str(_CPU_LAUNCHER)] if on_cpu else ["-m", "sglang.launch_server"]
    python = interpreter("sglang", settings.python, environment, on_cpu=on_cpu)
    argv = (python, *launcher, *spelled(arguments), "--host", "127.0.0.1")
    if adapter is not None:
        argv = (*argv, "--lora-target-modules", *adapter.targets)
    cores = sorted(os.sched_getaffinity(0))
    commands = []
    for index in range(number):
        env = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1", "TOKENIZERS_PARALLELISM": "false"}
        if settings.update == "broadcast":
            env["GLOO_SOCKET_IFNAME"] = "lo"  # the weight group is local to this machine
        if Path(model_path).is_dir():
            env["HF_HUB_OFFLINE"] = "1"
        if gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[index * parallel : (index + 1) * parallel])
        if on_cpu:
            env |= {
                "OMP_NUM_THREADS": str(config.threads),
                "SGLANG_CPU_OMP_THREADS_BIND": bound_cores(index, parallel, config.threads, cores),
            }
        own = gpus[index * parallel : (index + 1) * parallel] or range(index * parallel, (index + 1) * parallel)
        devices = ["cpu"] * parallel if on_cpu else [seen_device(gpu, environment) for gpu in own]
        commands.append(ServerCommand(name=f"{name}-{index}", argv=argv, program=sglang_program(devices), env=env))
    return commands
