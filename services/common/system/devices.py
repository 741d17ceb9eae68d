"""Devices: the device of a section of the recipe as an object of PyTorch, and the GPUs that the environment shows.

CUDA_VISIBLE_DEVICES of a job scheduler stays in force:

    environment CUDA_VISIBLE_DEVICES=4,5,6,7    recipe gpus: [0, 1]    process CUDA_VISIBLE_DEVICES=4,5

Imports torch on use.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import structlog

from services.common.errors import ConfigError

VARIABLE = "CUDA_VISIBLE_DEVICES"


def chosen_device(wanted: str, where: str) -> str:
    """Resolve ``auto`` to ``cpu`` or ``cuda``; ``where`` is the key of the setting.

    Raises ``ConfigError`` for ``cuda`` where PyTorch sees no GPU.
    """
    import torch

    is_there = torch.cuda.is_available()
    if wanted == "auto":
        return "cuda" if is_there else "cpu"
    if wanted == "cuda" and not is_there:
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except (AssertionError, RuntimeError) as error:  # which says so of a driver that is too old
            why = "was built without CUDA" if torch.version.cuda is None else f"sees no GPU ({error})"
            raise ConfigError(
                f"{where} is cuda, but PyTorch {torch.__version__} {why}: install a CUDA build that the driver supports, look at "
                "`nvidia-smi` and at CUDA_VISIBLE_DEVICES, or leave gpus out and write device: cpu"
            ) from None
    return wanted


def has_gpu_driver() -> bool:
    """Whether the kernel has a driver of a GPU that PyTorch may use: NVIDIA's, also in WSL2 and on Jetson, or AMD's."""
    return any(map(os.path.exists, ("/proc/driver/nvidia/gpus", "/dev/dxg", "/dev/nvhost-ctrl-gpu", "/dev/kfd")))


def log_device(device: str, dtype: str, *, here: bool = True) -> None:
    """Log the device of this process, or of its servers (not ``here``: asking for a name would take GPU memory)."""
    name = ""
    if here and device.startswith("cuda"):
        import torch

        name = torch.cuda.get_device_name(device)
    structlog.get_logger().info("device.chosen", device=device, name=name, dtype=dtype)


def visible_gpus(environment: Mapping[str, str]) -> list[str] | None:
    """The names of the GPUs that the environment shows, in CUDA's notation; None without a choice.

    >>> visible_gpus({"CUDA_VISIBLE_DEVICES": "4, 5"})
    ['4', '5']
    """
    value = environment.get(VARIABLE)
    if value is None:
        return None
    names = [name.strip() for name in value.split(",")]
    # CUDA shows the GPUs before the first name that is none, as -1.
    end = next((place for place, name in enumerate(names) if not name or name.startswith("-")), len(names))
    return names[:end]


def mapped_gpus(gpus: Sequence[int], environment: Mapping[str, str], where: str) -> list[str]:
    """The names of ``gpus``, counted among those that the environment shows.

    Raises:
        ConfigError: the environment shows fewer; ``where`` names the setting.
    """
    shown = visible_gpus(environment)
    if shown is None:
        return [str(gpu) for gpu in gpus]
    missing = [gpu for gpu in gpus if gpu >= len(shown)]
    if missing:
        numbers = f"the numbers 0 to {len(shown) - 1}" if shown else "no GPU"
        raise ConfigError(
            f"{where} takes GPU {', '.join(map(str, missing))}, but {VARIABLE}={environment[VARIABLE]} of this environment "
            f"shows {len(shown)} GPUs: a recipe counts among these, so write {numbers}, or unset the variable"
        )
    return [shown[gpu] for gpu in gpus]


def inside(environment: Mapping[str, str], own: Mapping[str, str], where: str) -> dict[str, str]:
    """The variables of a process within an environment: its own, with its GPUs mapped. Raises as ``mapped_gpus``."""
    gpus = [int(gpu) for gpu in visible_gpus(own) or []]
    variables = {**environment, **own}
    if gpus:
        variables[VARIABLE] = ",".join(mapped_gpus(gpus, environment, where))
    return variables
