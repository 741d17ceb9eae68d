"""The device of a section of the recipe, as an object of PyTorch. Imports torch on use."""

from __future__ import annotations

from services.common.errors import ConfigError


def chosen_device(wanted: str, where: str) -> str:
    """Resolve ``auto`` to ``cpu`` or ``cuda``; ``where`` is the key of the setting.

    Raises ``ConfigError`` for ``cuda`` where PyTorch sees no GPU.
    """
    import torch

    is_there = torch.cuda.is_available()
    if wanted == "auto":
        return "cuda" if is_there else "cpu"
    if wanted == "cuda" and not is_there:
        if torch.version.cuda is None:
            why = f"PyTorch {torch.__version__} was built without CUDA: install a CUDA build"
        else:
            why = "PyTorch sees no GPU: look at `nvidia-smi -L` and at CUDA_VISIBLE_DEVICES"
        raise ConfigError(f"{where} is cuda, but {why}, or write cpu")
    return wanted
