"""Settings of the SGLang engines of an inference service. The context length is the policy's `model.context_length`."""

from __future__ import annotations

from pydantic import Field

from services.common.config.base import Section


class SglangConfig(Section):
    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs of one engine."""
    memory_share: float = Field(default=0.8, gt=0, lt=1)
    """Share of each GPU's memory for weights and KV cache together (`mem_fraction_static`)."""
    max_running_requests: int | None = Field(default=None, ge=1)
    """Requests that one engine decodes at once; left out, as many as its KV cache holds."""
    extra_arguments: dict[str, str | int | float | bool] = {}
    """More arguments of the engine, by their names in SGLang's `ServerArgs`."""
