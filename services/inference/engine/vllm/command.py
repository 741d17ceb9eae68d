"""Builds the command line and environment of vLLM servers from an inference service's settings. Starts no process.

Also the program's part of a running server: its arguments for port and key, and remedies for its failures."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from services.common.config.processes.servers import MASK_TOKENS
from services.common.config.processes.services import InferenceConfig
from services.common.errors import ConfigError
from services.inference.engine import vllm_server
from services.inference.engine.served.environment import (
    Argument,
    bound_cores,
    interpreter,
    own_arguments,
    spelled,
)
from services.inference.engine.served.process import PORTS_TRIED, Program, ServerCommand
from services.inference.engine.vllm.client import VllmClient

LAUNCHER = Path(vllm_server.__file__).resolve().with_name("launch.py")
CPU_BLOCK_TOKENS = 128  # of vLLM's KV cache on a CPU
CPU_CACHE_BYTES = 1 << 30  # most of a KV cache in host memory, and all of one whose model's shape is unknown
_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
OURS = (
    "model",
    "host",
    "port",
    "uds",
    "api_key",
    "middleware",
    "tensor_parallel_size",
    "tokens_only",
    "logprobs_mode",
    "max_logprobs",
    "max_model_len",
    "weight_transfer_config",
    "worker_extension_cls",
    "enable_prompt_tokens_details",
)

HINTS = (
    (
        r"lacks what Rollmill relies on",
        "this vLLM has another interface than the one that the engine is written for: install the version that "
        "`make vllm-env` pins",
    ),
    (
        r"No module named ['\"]?vllm",
        "this interpreter has no vLLM: run `make vllm-env` (vllm-cpu-env for CPUs), or name one that has it with vllm.python or ROLLMILL_VLLM_PYTHON",
    ),
    (
        r"unrecognized arguments?:? .*|invalid choice: .*|argument --\S+: .*",
        "vLLM does not know an argument: correct vllm.extra_arguments",
    ),
    (
        r"out of memory|OutOfMemoryError|No available memory for the cache blocks|is less than desired|"
        r"KV cache is needed|Cannot allocate memory",
        "too little memory: raise vllm.memory_share if the GPU is free, lower it if other processes use the GPU, raise "
        "vllm.tensor_parallel, or lower policies.<name>.model.context_length or vllm.max_running_requests",
    ),
    (
        r"invalid device ordinal|No CUDA GPUs are available|no CUDA-capable device|CUDA driver|Invalid GPU id",
        "no such GPU here: correct inference.<name>.gpus (`nvidia-smi -L` lists them)",
    ),
    (
        r"no file named config\.json|Invalid repository ID|is not a local folder|Repo id must be|Can't load the "
        r"configuration|does not appear to have a file named|Cannot find any model weights|Unrecognized model",
        "the model path holds no model that vLLM can read: correct policies.<name>.model.path",
    ),
    (
        r"Unsupported CPU attention configuration",
        "vLLM's attention on a CPU takes other head dimensions than this model has (multiples of 32): write engine: torch",
    ),
    (r"[Aa]ddress already in use", f"ports were taken meanwhile, {PORTS_TRIED} times in a row"),
)


def _arguments(port: int, version: int, key_file: Path) -> tuple[str, ...]:
    """The weights of the stage, loaded before the server serves, bring their version along."""
    return ("--key-file", str(key_file), "--port", str(port))


def vllm_program(most_kept: int) -> Program:
    """``most_kept``: tokens of a cut distribution that a server can list."""
    return Program(
        name="vLLM",
        section="vllm",
        connect=partial(VllmClient, most_kept=most_kept),
        arguments=_arguments,
        hints=HINTS,
        port_taken=re.compile(r"[Aa]ddress already in use"),
    )


"""Arguments that are never taken from `extra_arguments`: the engine relies on its own values."""


def server_commands(
    config: InferenceConfig,
    *,
    name: str,
    model_path: str,
    model_config: Mapping[str, Any],
    context_length: int,
    number: int,
    gpus: Sequence[str],
    on_cpu: bool,
    environment: Mapping[str, str] = os.environ,
) -> list[ServerCommand]:
    """Commands of ``number`` data-parallel servers of one policy; ``gpus`` are theirs alone, empty for all visible GPUs.
    ``model_config``: the model's ``config.json``, empty if unknown.

    Raises:
        ConfigError: an extra argument that is not the recipe's to set, or fewer GPUs than the servers need.
    """
    settings = config.vllm
    parallel = settings.tensor_parallel
    if gpus and len(gpus) < number * parallel:
        raise ConfigError(f"{number} vLLM engines of {parallel} GPUs need {number * parallel}, but have {len(gpus)}")
    most_running = settings.max_running_requests or config.engine_slots or config.num_slots
    most_kept = min(MASK_TOKENS, int(model_config.get("vocab_size", MASK_TOKENS)))
    arguments: dict[str, Argument] = {
        "model": model_path,
        "tensor_parallel_size": parallel,
        "dtype": config.dtype,
        "max_model_len": context_length,
        "max_num_seqs": most_running + 1,  # and a request that checks the server
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": most_kept,
        "tokens_only": True,
        "enable_prompt_tokens_details": True,
        "worker_extension_cls": "staged.Extension",
        "weight_transfer_config": json.dumps({"backend": "rollmill_stage"}),
        "middleware": "guard.KeyRequired",
        "host": "127.0.0.1",
        "uvicorn_log_level": "warning",
    }
    if on_cpu:
        arguments["enforce_eager"] = True
        arguments["kv_cache_memory_bytes"] = _cpu_cache_bytes(config, model_config, most_running, context_length)
    else:
        arguments["gpu_memory_utilization"] = settings.memory_share
        # Log-probabilities of bf16 logits are off by up to .03, which the ratio of a loss would take for staleness.
        arguments["hf_overrides"] = json.dumps({"head_dtype": "float32"})
    arguments |= own_arguments("vllm", settings.extra_arguments, OURS)
    argv = (
        interpreter("vllm", settings.python, environment, on_cpu=on_cpu),
        str(LAUNCHER),
        *spelled(arguments, negated=True),
    )
    cores = sorted(os.sched_getaffinity(0))
    commands = []
    for index in range(number):
        env = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1", "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false"}
        if Path(model_path).is_dir():
            env["HF_HUB_OFFLINE"] = "1"
        if gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[index * parallel : (index + 1) * parallel])
        if on_cpu:
            bound = bound_cores(index, parallel, config.threads, cores)
            env |= {"OMP_NUM_THREADS": str(config.threads), "VLLM_CPU_OMP_THREADS_BIND": bound}
        commands.append(ServerCommand(name=f"{name}-{index}", argv=argv, program=vllm_program(most_kept), env=env))
    return commands


def _cpu_cache_bytes(
    config: InferenceConfig, model_config: Mapping[str, Any], most_running: int, context_length: int
) -> int:
    """Keys and values of all requests at full context, in whole blocks."""
    try:
        num_heads = int(model_config["num_attention_heads"])
        width = int(model_config.get("num_key_value_heads") or num_heads) * int(
            model_config.get("head_dim") or int(model_config["hidden_size"]) // num_heads
        )
        num_layers = int(model_config["num_hidden_layers"])
    except KeyError:
        return CPU_CACHE_BYTES
    num_blocks = (most_running + 1) * (-(-context_length // CPU_BLOCK_TOKENS) + 1)
    token_bytes = 2 * num_layers * width * _ELEMENT_BYTES[config.dtype]
    return min(CPU_CACHE_BYTES, num_blocks * CPU_BLOCK_TOKENS * token_bytes)
