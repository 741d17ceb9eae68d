"""Settings of the SGLang engines of an inference service. The context length is the policy's `model.context_length`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from services.common.config.base import Section

MASK_TOKENS = 1024  # of a cut distribution, how many tokens a server can list at most; it is started with this


class SglangConfig(Section):
    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs of one engine."""
    memory_share: float = Field(default=0.8, gt=0, lt=1)
    """Share of each GPU's memory for weights and KV cache together (`mem_fraction_static`)."""
    max_running_requests: int | None = Field(default=None, ge=1)
    """Requests that one engine decodes at once; left out, as many as the service has slots and its KV cache holds."""
    python: str | None = None
    """Interpreter of the environment that holds SGLang. Variable: MILLRACE_SGLANG_PYTHON. Left out: `.venv-sglang` beside
    the sources if it is there, else the service's own."""
    update: Literal["disk", "broadcast"] = "disk"
    """How weights reach the engines: `disk` through a file, in shared memory where there is room; `broadcast` through a
    gloo group that the service and its engines form, on CPUs only."""
    stage_directory: str | None = None
    """Where the file of `disk` lies; left out, /dev/shm if the model fits there, else the run directory."""
    ready_timeout_s: float = Field(default=600.0, gt=0)
    """An engine that does not answer after this long has failed to load."""
    restarts: int = Field(default=5, ge=0)
    """Times in a row that an engine which dies is started again without having served."""
    stall_timeout_s: float = Field(default=300.0, gt=0)
    """An engine that leaves a request without a token for this long is asked for one, and started again if none comes."""
    chunk_tokens: int = Field(default=16, ge=1)
    """Tokens of a request that come together, unless somebody watches it: what its continuation may lose when an engine
    dies."""
    extra_arguments: dict[str, str | int | float | bool] = {}
    """More arguments of the engine, by their names in SGLang's `ServerArgs`."""
