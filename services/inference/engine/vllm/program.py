"""vLLM as a server program: its arguments for port and key, and remedies for its failures."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

from services.inference.engine.served.process import PORTS_TRIED, Program
from services.inference.engine.vllm.client import VllmClient

HINTS = (
    (
        r"lacks what Millrace relies on",
        "this vLLM has another interface than the one that the engine is written for: install the version that "
        "`make vllm-env` pins",
    ),
    (
        r"No module named ['\"]?vllm",
        "this interpreter has no vLLM: name one that has with vllm.python or MILLRACE_VLLM_PYTHON",
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
