"""Settings of engines that are servers: SGLang's and vLLM's. The context length is the policy's `model.context_length`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from services.common.config.base import Section

_LOADED_BYTES_PER_S = 1e8  # of a slow disk
MASK_TOKENS = 1024  # of a cut distribution, how many tokens a server can list at most; it is started with this


class ServersConfig(Section):
    """The settings that SGLang and vLLM share."""

    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs of one engine."""
    memory_share: float = Field(default=0.8, gt=0, lt=1)
    """Share of each GPU's memory for weights and KV cache together (SGLang's `mem_fraction_static`, vLLM's `gpu_memory_utilization`)."""
    max_running_requests: int | None = Field(default=None, ge=1)
    """Requests that one engine decodes at once; left out, as many as the service has slots and its KV cache holds."""
    python: str | None = None
    """Interpreter of the environment that holds the engine's package. Variable: ROLLMILL_SGLANG_PYTHON,
    ROLLMILL_VLLM_PYTHON. Left out: that of `make sglang-env` or `make vllm-env` (on a CPU `-cpu-env`), else the service's own."""
    stage_directory: str | None = None
    """Where the file of weights lies that the engines read; left out, /dev/shm if the model fits there, else the run directory."""
    ready_timeout_s: float = Field(default=600.0, gt=0)
    """An engine that does not answer after this long has failed to load; a second more for each 100 MB of weights."""
    restarts: int = Field(default=5, ge=0)
    """Times in a row that an engine which dies is started again without having served."""
    stall_timeout_s: float = Field(default=300.0, gt=0)
    """An engine that leaves a request without a token for this long is asked for one, and started again if none comes."""
    chunk_tokens: int = Field(default=16, ge=1)
    """Tokens of a request that come together, unless a client streams the request: its continuation may lose so many
    when an engine dies."""
    extra_arguments: dict[str, str | int | float | bool] = {}
    """More arguments of the engine, by their names in SGLang's `ServerArgs` or vLLM's `AsyncEngineArgs`."""

    def loading_timeout_s(self, size_bytes: float) -> float:
        """The longest start of an engine whose weights have that size.

        >>> ServersConfig().loading_timeout_s(16.4e9)
        764.0
        """
        return self.ready_timeout_s + size_bytes / _LOADED_BYTES_PER_S


class SglangConfig(ServersConfig):
    update: Literal["disk", "broadcast", "tensors"] = "disk"
    """How weights reach the engines: `disk` through a file, in shared memory where there is room; `tensors` in the
    memory of their GPUs (CUDA IPC, no GPU has tried it; up to 1 GiB of each GPU and a CUDA context more), or in shared memory on a CPU;
    `broadcast` through a gloo group that the service and its engines form, on CPUs only."""


class VllmConfig(ServersConfig):
    """vLLM has the shared settings only."""
