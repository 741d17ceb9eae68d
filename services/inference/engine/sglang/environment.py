"""What a machine gives SGLang servers: an interpreter that has it, GPUs, or a CPU alone. Imports nothing heavy."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from services.common.config.services import InferenceConfig
from services.common.errors import ConfigError

PYTHON = "MILLRACE_SGLANG_PYTHON"
_REPOSITORY = Path(__file__).resolve().parents[4]


def interpreter(setting: str | None, environment: Mapping[str, str] = os.environ) -> str:
    """The interpreter that has SGLang: the setting, the variable, the environment beside the sources, or our own.

    ``ConfigError`` when the one that was named is not there.
    """
    beside = _REPOSITORY / ".venv-sglang" / "bin" / "python"
    found = setting or environment.get(PYTHON) or (str(beside) if beside.exists() else sys.executable)
    if shutil.which(found) is None:
        where = "sglang.python" if setting else PYTHON
        raise ConfigError(
            f"{where}: there is no interpreter {found}; name the one of the environment that holds SGLang"
        )
    return found


def own_gpus(config: InferenceConfig, environment: Mapping[str, str] = os.environ) -> list[str]:
    """The GPUs of a service, as CUDA names them; empty when nobody chose any."""
    if config.gpus:
        return [str(gpu) for gpu in config.gpus]
    return [gpu.strip() for gpu in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu.strip()]


def runs_on_cpu(config: InferenceConfig) -> bool:
    """``auto`` asks for NVIDIA's driver, without waking a GPU."""
    if config.device != "auto":
        return config.device == "cpu"
    return not (os.path.exists("/proc/driver/nvidia/gpus") or shutil.which("nvidia-smi"))
