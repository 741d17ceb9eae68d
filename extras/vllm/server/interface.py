"""The parts of vLLM that the engine relies on, and the check that a vLLM has them. Written against 0.32.0.

vLLM promises none of these names. A version without one of them is refused before it loads a model, because some
differences would be silent: without spans of weight versions, tokens of an update would have the wrong version.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, get_args

SERVER = "vllm.entrypoints.launchers.api_server.entry"

# A function or a class, and names that it must have: parameters of a function, fields of a record.
RELIED_ON: Mapping[str, tuple[str, ...]] = {
    f"{SERVER}:main": (),
    "vllm.engine.arg_utils:AsyncEngineArgs": (
        "enforce_eager",
        "gpu_memory_utilization",
        "hf_overrides",
        "kv_cache_memory_bytes",
        "logprobs_mode",
        "max_logprobs",
        "max_model_len",
        "max_num_seqs",
        "tensor_parallel_size",
        "tokens_only",
        "weight_transfer_config",
        "worker_extension_cls",
    ),
    "vllm.sampling_params:SamplingParams": (
        "detokenize",
        "ignore_eos",
        "logprobs",
        "max_tokens",
        "min_p",
        "min_tokens",
        "stop_token_ids",
        "stream_interval",
        "temperature",
        "top_k",
        "top_p",
    ),
    "vllm.entrypoints.scale_out.token_in_token_out.protocol:GenerateRequest": (
        "request_id",
        "sampling_params",
        "stream",
        "stream_options",
        "token_ids",
    ),
    "vllm.entrypoints.scale_out.token_in_token_out.protocol:GenerateTokensStreamChoice": (
        "finish_reason",
        "logprobs",
        "token_ids",
        "weight_versions",
    ),
    "vllm.entrypoints.scale_out.token_in_token_out.protocol:GenerateLogProbsContent": (
        "logprob",
        "token_id",
        "top_logprobs",
    ),
    "vllm.outputs:WeightVersionSpan": ("end", "start", "version"),
    "vllm.entrypoints.rl.online.api_router:pause_generation": ("clear_cache", "mode"),
    "vllm.entrypoints.rl.online.api_router:resume_generation": (),
    "vllm.entrypoints.rl.online.api_router:abort_requests": (),
    "vllm.entrypoints.rl.online.api_router:start_weight_update": (),
    "vllm.entrypoints.rl.online.api_router:update_weights": ("update_info",),
    "vllm.entrypoints.rl.online.api_router:finish_weight_update": ("weight_version",),
    "vllm.entrypoints.serve.dev.cache.api_router:reset_prefix_cache": ("reset_running_requests",),
    "vllm.distributed.weight_transfer.factory:WeightTransferEngineFactory.register_engine": (
        "module_path_or_cls",
        "name",
    ),
    "vllm.distributed.weight_transfer.base:WeightTransferEngine.__init__": ("config", "device", "model", "vllm_config"),
    "vllm.distributed.weight_transfer.base:WeightTransferEngine.update_weights": ("update_info",),
    "vllm.distributed.weight_transfer.base:WeightTransferEngine.start_weight_update": (),
    "vllm.distributed.weight_transfer.base:WeightTransferEngine.finish_weight_update": (),
    "vllm.model_executor.model_loader.reload:initialize_layerwise_reload": ("model",),
    "vllm.model_executor.model_loader.reload:finalize_layerwise_reload": (),
    "vllm.model_executor.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod.apply": ("layer", "x"),
}
PAUSE_MODES = "vllm.v1.engine:PauseMode"
PAUSE_MODE = "keep"


def missing(load: Callable[[str], Any] = importlib.import_module) -> list[str]:
    """What vLLM lacks of the interface, one text each. ``load`` imports a module."""
    lacking = []
    for where, wanted in RELIED_ON.items():
        found = _find(where, load)
        if found is None:
            lacking.append(where)
        elif absent := sorted(set(wanted) - _names(found)):
            lacking.append(f"{where} without {', '.join(absent)}")
    if PAUSE_MODE not in get_args(_find(PAUSE_MODES, load)):
        lacking.append(f"{PAUSE_MODES} without {PAUSE_MODE}")
    return lacking


def _find(where: str, load: Callable[[str], Any]) -> Any:
    """The object at ``MODULE:NAME``, or None."""
    module, _, path = where.partition(":")
    try:
        found = load(module)
    except ImportError:
        return None
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def _names(found: Any) -> set[str]:
    """Fields of a record class, or parameters of a function."""
    if isinstance(of_pydantic := getattr(found, "model_fields", None), dict):
        return set(of_pydantic)
    if is_dataclass(found):
        return {field.name for field in fields(found)}
    if isinstance(of_struct := getattr(found, "__struct_fields__", None), tuple):
        return set(of_struct)
    return set(inspect.signature(found).parameters)
