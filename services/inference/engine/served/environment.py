"""Finds the interpreter, GPUs, cores and arguments of servers. Imports no heavy modules."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from services.common.config.processes.services import InferenceConfig
from services.common.errors import ConfigError
from services.common.installing import COMPLETE, ROOT
from services.common.system.devices import has_gpu_driver, mapped_gpus, visible_gpus

PORTS_TRIED = 3  # of one start: a server binds its port after loading, seconds to minutes after the port was found free
Argument = str | int | float | bool


def python_variable(engine: str) -> str:
    """The variable that names the interpreter of an engine's package.

    >>> python_variable("sglang")
    'ROLLMILL_SGLANG_PYTHON'
    """
    return f"ROLLMILL_{engine.upper()}_PYTHON"


def interpreter(
    engine: str, setting: str | None, environment: Mapping[str, str] = os.environ, *, on_cpu: bool = False
) -> str:
    """The interpreter that has the package of an engine (``sglang`` or ``vllm``): the setting, the variable, the
    environment for this device beside the sources if its install came to its end, or our own.

    ``ConfigError`` if the named interpreter does not exist.
    """
    beside = ROOT / f".venv-{engine}{'-cpu' if on_cpu else ''}"
    made = str(beside / "bin" / "python") if (beside / COMPLETE).exists() else sys.executable
    found = setting or environment.get(python_variable(engine)) or made
    if shutil.which(found) is None:
        where = f"{engine}.python" if setting else python_variable(engine)
        raise ConfigError(
            f"{where}: there is no interpreter {found}; name the one of the environment that holds {engine}"
        )
    return found


def own_gpus(config: InferenceConfig, environment: Mapping[str, str] = os.environ) -> list[str]:
    """The GPUs of a service, in CUDA's notation; empty without a choice.

    Where the environment shows as many GPUs as the service takes, they are its own: the launcher has mapped them.
    """
    shown = visible_gpus(environment)
    if not config.gpus or (shown is not None and len(shown) == len(config.gpus)):
        return shown or []
    return mapped_gpus(config.gpus, environment, "inference.*.gpus")


def seen_device(gpu: str | int, environment: Mapping[str, str] = os.environ) -> str:
    """A GPU in torch's notation, as this process sees it: by name in CUDA's notation, or by number among the visible ones.

    >>> seen_device("5", {"CUDA_VISIBLE_DEVICES": "4,5"})
    'cuda:1'
    """
    shown = visible_gpus(environment)
    if isinstance(gpu, int) or shown is None:
        return f"cuda:{gpu}"
    return f"cuda:{shown.index(gpu)}"


def runs_on_cpu(config: InferenceConfig) -> bool:
    """Whether the device is the CPU; ``auto`` checks for a GPU's driver, without initialising a GPU."""
    if config.device != "auto":
        return config.device == "cpu"
    return not (has_gpu_driver() or shutil.which("nvidia-smi"))


def own_arguments(engine: str, extra: Mapping[str, Argument], ours: Collection[str]) -> dict[str, Argument]:
    """The recipe's arguments of a program, with underscores. ``ConfigError`` for one of ``ours``."""
    if mistaken := [key for key in extra if _plain(key) in ours]:
        raise ConfigError(
            f"{engine}.extra_arguments names {', '.join(mistaken)}, which Rollmill sets itself: remove them"
        )
    return {_plain(key): value for key, value in extra.items()}


def spelled(arguments: Mapping[str, Argument], *, negated: bool = False) -> list[str]:
    """Arguments as words of a command line; a false one is left out, or negated (``--no-x``).

    >>> spelled({"tp_size": 2, "sleep_on_idle": True, "async_scheduling": False}, negated=True)
    ['--tp-size', '2', '--sleep-on-idle', '--no-async-scheduling']
    """
    words: list[str] = []
    for key, value in arguments.items():
        option = key.replace("_", "-")
        if not isinstance(value, bool):
            words += [f"--{option}", str(value)]
        elif value or negated:
            words.append(f"--{option}" if value else f"--no-{option}")
    return words


def bound_cores(index: int, num_ranks: int, threads: int, cores: Sequence[int]) -> str:
    """Cores of each rank of a server, from the last one down: SGLang and vLLM want them named, and they must exist."""
    per_rank = min(threads, len(cores))
    ranks = range(index * num_ranks, (index + 1) * num_ranks)
    groups = [[cores[-1 - (rank * per_rank + i) % len(cores)] for i in range(per_rank)] for rank in ranks]
    return "|".join(",".join(map(str, sorted(group))) for group in groups)


def _plain(key: str) -> str:
    return key.lstrip("-").replace("-", "_")


def own_ranks(engine: str, number: int, parallel: int, gpus: Sequence[str]) -> list[Sequence[str]]:
    """The GPUs of each of ``number`` servers of ``parallel`` ranks; empty lists for all visible GPUs.

    ``ConfigError`` for fewer GPUs than the servers need.
    """
    if gpus and len(gpus) < number * parallel:
        raise ConfigError(
            f"{number} {engine} engines of {parallel} GPUs need {number * parallel}, but have {len(gpus)}"
        )
    return [gpus[index * parallel : (index + 1) * parallel] for index in range(number)]


def server_environment(model_path: str, gpus: Sequence[str]) -> dict[str, str]:
    """What every server's environment has beside its program's own."""
    env = {"TOKENIZERS_PARALLELISM": "false"}
    if Path(model_path).is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    if gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return env


def hints_of(program: str, section: str, remedies: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Patterns of a server's output with remedies: the program's own first, then those of every program."""
    return [
        *remedies,
        (
            rf"No module named ['\"]?{section}",
            f"this interpreter has no {program}: run `make {section}-env` ({section}-cpu-env for CPUs), or name one that has it "
            f"with {section}.python or {python_variable(section)}",
        ),
        (
            r"unrecognized arguments?:? .*|invalid choice: .*|argument --\S+: .*",
            f"{program} does not know an argument: correct {section}.extra_arguments",
        ),
        (
            r"out of memory|OutOfMemoryError|Not enough memory|mem-fraction-static|Cannot allocate memory|"
            r"No available memory for the cache blocks|is less than desired|KV cache is needed",
            f"too little memory: raise {section}.memory_share if the GPU is free, lower it if other processes use the GPU, raise "
            f"{section}.tensor_parallel, or lower policies.<name>.model.context_length or {section}.max_running_requests",
        ),
        (
            r"invalid device ordinal|No CUDA GPUs are available|no CUDA-capable device|CUDA driver|Invalid GPU id",
            "no such GPU here: correct inference.<name>.gpus (`nvidia-smi -L` lists them)",
        ),
        (
            r"no file named config\.json|Incorrect path_or_model_id|Invalid repository ID|is not a local folder|"
            r"Repo id must be|Can't load the configuration|does not appear to have a file named|"
            r"Cannot find any model weights|Unrecognized model",
            f"the model path holds no model that {program} can read: correct policies.<name>.model.path",
        ),
        (r"[Aa]ddress already in use", f"ports were taken meanwhile, {PORTS_TRIED} times in a row"),
    ]
