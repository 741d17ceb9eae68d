"""The base of every config section: strict, frozen, and its own manual."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Unknown keys are refused, as are numbers that are infinite or NaN; the docstring under a field is its description in the
    schema."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )


def with_device(written: Any, on_gpu: dict[str, Any], on_cpu: dict[str, Any]) -> Any:
    """A section as it is written, with ``auto`` replaced as soon as its device is known: by ``gpus`` or by ``device``.

    >>> with_device({"gpus": [0], "dtype": "auto"}, {"dtype": "bfloat16"}, {"dtype": "float32"})
    {'gpus': [0], 'dtype': 'bfloat16', 'device': 'cuda'}
    """
    device = written.get("device", "auto") if isinstance(written, dict) else None
    if device == "auto" and written.get("gpus"):
        device = "cuda"
    if device not in ("cuda", "cpu"):
        return written
    values = on_gpu if device == "cuda" else on_cpu
    filled = {key: value for key, value in values.items() if written.get(key, "auto") == "auto"}
    return {**written, "device": device, **filled}
