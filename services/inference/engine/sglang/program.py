"""SGLang as a server program: its arguments for port, version and key, and remedies for its failures."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from services.inference.engine.served.process import PORTS_TRIED, Program
from services.inference.engine.sglang.client import SglangClient

HINTS = (
    (
        r"No module named ['\"]?sglang",
        "this interpreter has no SGLang: name one that has with sglang.python or MILLRACE_SGLANG_PYTHON",
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
