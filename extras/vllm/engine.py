"""vLLM: its HTTP interface (only here), the command line of its servers, and the engine over them. Written against 0.32.0.

Log-probabilities are those of the sampling distribution: the server is started with processed log-probabilities, after
temperature, top-k, top-p, min-p and forbidden tokens. Where these cut, the tokens that could be drawn are those of the
likeliest ones that have a finite log-probability. ``server`` runs beside vLLM.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from extras.vllm import server
from services.common.config.processes import MASK_TOKENS
from services.common.errors import InfrastructureError, InvalidRequestError
from services.inference.engine.served.client import (
    CONTROL_TIMEOUT_S,
    UPDATE_TIMEOUT_S,
    CallRequest,
    Chunk,
    Finish,
    PauseMode,
    Reader,
    Refused,
    ServerClient,
    finish_of,
    kept_of,
)
from services.inference.engine.served.engine import ServedEngine, ServedSetup, commands_of, engine_of, read_model_config
from services.inference.engine.served.fleet import Transfer
from services.inference.engine.served.process import (
    Argument,
    Program,
    ServerCommand,
    hints_of,
    own_arguments,
    runs_on_cpu,
    spelled,
)

_ID_PREFIX = "generate-tokens-"  # the server puts it before a request's id
_NOT_A_NUMBER = -9000.0  # the server writes -9999 for minus infinity and for NaN


class VllmClient(ServerClient):
    """Client of one vLLM server. ``most_kept``: tokens of a cut distribution that the server can list."""

    program = "vLLM"
    generate_path = "/inference/v1/generate"
    ready_path = "/health"

    def __init__(self, address: str, key: str, *, most_kept: int) -> None:
        super().__init__(address, key)
        self._most_kept = most_kept

    def body(self, call: CallRequest) -> dict[str, Any]:
        sampling, masked = call.sampling, call.sampling.is_truncated
        parameters: dict[str, Any] = {
            "temperature": sampling.temperature,
            "max_tokens": call.max_new_tokens,
            "stream_interval": call.chunk_tokens,
            "ignore_eos": True,
            "stop_token_ids": list(call.stop_token_ids),
            "detokenize": False,
            "logprobs": 0,
        }
        if call.suppress_stop:
            parameters["min_tokens"] = call.max_new_tokens
        if masked:
            top_k = min(sampling.top_k or self._most_kept, self._most_kept)
            parameters |= {"top_p": sampling.top_p, "top_k": top_k, "min_p": sampling.min_p, "logprobs": top_k}
        return {
            "request_id": call.rid,
            "token_ids": list(call.input_ids),
            "sampling_params": parameters,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def reader(self, call: CallRequest) -> Reader:
        return _Reader(call).read

    async def abort(self, rid: str) -> None:
        await self._post("/abort_requests", {"request_ids": [_ID_PREFIX + rid]}, CONTROL_TIMEOUT_S)

    async def abort_all(self) -> None:
        await self._post("/abort_requests", {}, CONTROL_TIMEOUT_S)

    # -- control ------------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode) -> None:
        """Requests are frozen; with ``retract`` they lose their KV cache, as do cached prefixes."""
        clear = "true" if mode == "retract" else "false"
        await self._post(f"/pause?mode=keep&clear_cache={clear}", {}, CONTROL_TIMEOUT_S)

    async def resume(self) -> None:
        await self._post("/resume", {}, CONTROL_TIMEOUT_S)

    async def flush(self) -> None:
        answer = await self._post("/reset_prefix_cache?reset_running_requests=true", {}, CONTROL_TIMEOUT_S)
        if answer.get("success") is not True:
            raise Refused(f"vLLM did not forget its cached prefixes: {answer}", 500)

    async def update_from_disk(self, directory: str, version: int, *, flush: bool) -> None:
        await self._post("/start_weight_update", {}, CONTROL_TIMEOUT_S)
        await self._post("/update_weights", {"update_info": {"directory": directory}}, UPDATE_TIMEOUT_S)
        await self._post("/finish_weight_update", {"weight_version": str(version)}, UPDATE_TIMEOUT_S)
        if flush:
            await self.flush()

    # -- questions ----------------------------------------------------------------------------------------------

    async def is_generating(self, timeout_s: float) -> bool:
        parameters = {"max_tokens": 1, "temperature": 0.0, "detokenize": False}
        data = orjson.dumps({"token_ids": [0], "sampling_params": parameters})
        return await self._succeeds("POST", self.generate_path, timeout_s, data)


class _Reader:
    """Reads the messages of one stream. The last tokens wait for the message of usage, which has the cached tokens."""

    def __init__(self, call: CallRequest) -> None:
        self._call = call
        self._last: Chunk | None = None

    def read(self, row: dict[str, Any]) -> Chunk | None:
        if (error := row.get("error")) is not None:
            _raise(error)
        if not row["choices"]:
            if self._last is None:
                raise ValueError("usage before the end")
            details = row["usage"].get("prompt_tokens_details") or {}
            return replace(self._last, cached_tokens=int(details.get("cached_tokens") or 0))
        (choice,) = row["choices"]
        chunk = self._chunk(choice)
        if chunk.finish is None:
            return chunk
        self._last = chunk
        return None

    def _chunk(self, choice: dict[str, Any]) -> Chunk:
        token_ids = [int(token) for token in choice.get("token_ids") or []]
        content = (choice.get("logprobs") or {}).get("content") or []
        if [int(place["token_id"]) for place in content] != token_ids:
            raise ValueError(f"{len(token_ids)} tokens with {len(content)} log-probabilities")
        logprobs = [float(place["logprob"]) for place in content]
        masks = [
            [int(top["token_id"]) for top in place.get("top_logprobs") or [] if top["logprob"] > _NOT_A_NUMBER]
            for place in content
        ]
        return Chunk(
            token_ids=token_ids,
            logprobs=[value if value > _NOT_A_NUMBER else math.nan for value in logprobs],
            kept=kept_of(self._call, token_ids, masks),
            cached_tokens=0,
            finish=_read_finish(choice),
        )


def _read_finish(choice: dict[str, Any]) -> Finish | None:
    reason = choice.get("finish_reason")
    if reason is None:
        return None
    message = "" if reason in ("stop", "length", "abort") else str(reason)
    return finish_of(reason, choice, message)


def _raise(error: Any) -> None:
    message = str(error.get("message", "")) if isinstance(error, dict) else str(error)
    code = error.get("code") if isinstance(error, dict) else None
    if isinstance(code, int) and 400 <= code < 500:
        raise InvalidRequestError(f"vLLM refuses the request: {message}")
    raise InfrastructureError(f"vLLM ended the call: {message}")


LAUNCHER = Path(server.__file__).resolve().with_name("launch.py")
CPU_BLOCK_TOKENS = 128  # of vLLM's KV cache on a CPU
CPU_CACHE_BYTES = 1 << 30  # most of a KV cache in host memory, and all of one whose model's shape is unknown
_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Arguments that are never taken from `extra_arguments`: the engine relies on its own values.
OURS = (
    "model",
    "host",
    "port",
    "uds",
    "api_key",
    "middleware",
    "tensor_parallel_size",
    "tokens_only",
    "logprobs_mode",
    "max_logprobs",
    "max_model_len",
    "weight_transfer_config",
    "worker_extension_cls",
    "enable_prompt_tokens_details",
)

REMEDIES = (
    (
        r"lacks what Rollmill relies on",
        "this vLLM has another interface than the one that the engine is written for: install the version that "
        "`make vllm-env` pins",
    ),
    (
        r"Unsupported CPU attention configuration",
        "vLLM's attention on a CPU takes other head dimensions than this model has (multiples of 32): write engine: torch",
    ),
)


def vllm_program(most_kept: int) -> Program:
    """``most_kept``: tokens of a cut distribution that a server can list."""
    return Program(
        name="vLLM",
        section="vllm",
        connect=partial(VllmClient, most_kept=most_kept),
        # The weights of the stage, loaded before the server serves, bring their version along.
        arguments=lambda port, version, key_file: ("--key-file", str(key_file), "--port", str(port)),
        hints=hints_of("vLLM", "vllm", REMEDIES),
        port_taken=re.compile(r"[Aa]ddress already in use"),
    )


def server_commands(
    setup: ServedSetup, model_config: Mapping[str, Any], environment: Mapping[str, str] = os.environ
) -> list[ServerCommand]:
    """Commands of the data-parallel servers of one policy. ``model_config``: the model's ``config.json``, empty if unknown.

    Raises:
        ConfigError: an extra argument that is not the recipe's to set, or fewer GPUs than the servers need.
    """
    config, settings = setup.config, setup.config.vllm
    on_cpu, parallel = runs_on_cpu(config), settings.tensor_parallel
    most_running = settings.max_running_requests or config.num_slots
    most_kept = min(MASK_TOKENS, int(model_config.get("vocab_size", MASK_TOKENS)))
    arguments: dict[str, Argument] = {
        "model": setup.model_path,
        "tensor_parallel_size": parallel,
        "dtype": config.dtype,
        "max_model_len": setup.context_length,
        "max_num_seqs": most_running + 1,  # and a request that checks the server
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": most_kept,
        "tokens_only": True,
        "enable_prompt_tokens_details": True,
        "worker_extension_cls": "staged.Extension",
        "weight_transfer_config": json.dumps({"backend": "rollmill_stage"}),
        "middleware": "guard.KeyRequired",
        "host": "127.0.0.1",
        "uvicorn_log_level": "warning",
    }
    if on_cpu:
        arguments["enforce_eager"] = True
        arguments["kv_cache_memory_bytes"] = _cpu_cache_bytes(setup, model_config, most_running)
    else:
        arguments["gpu_memory_utilization"] = settings.memory_share
        # Log-probabilities of bf16 logits are off by up to .03, which the ratio of a loss would take for staleness.
        arguments["hf_overrides"] = json.dumps({"head_dtype": "float32"})
    arguments |= own_arguments("vllm", settings.extra_arguments, OURS)
    words = (str(LAUNCHER), *spelled(arguments, negated=True))
    env = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1", "VLLM_NO_USAGE_STATS": "1"}
    return commands_of(setup, words, lambda devices: vllm_program(most_kept), env, environment)


def _cpu_cache_bytes(setup: ServedSetup, model_config: Mapping[str, Any], most_running: int) -> int:
    """Keys and values of all requests at full context, in whole blocks."""
    try:
        num_heads = int(model_config["num_attention_heads"])
        width = int(model_config.get("num_key_value_heads") or num_heads) * int(
            model_config.get("head_dim") or int(model_config["hidden_size"]) // num_heads
        )
        num_layers = int(model_config["num_hidden_layers"])
    except KeyError:
        return CPU_CACHE_BYTES
    num_blocks = (most_running + 1) * (-(-setup.context_length // CPU_BLOCK_TOKENS) + 1)
    token_bytes = 2 * num_layers * width * _ELEMENT_BYTES[setup.config.dtype]
    return min(CPU_CACHE_BYTES, num_blocks * CPU_BLOCK_TOKENS * token_bytes)


def build_engine(setup: ServedSetup) -> ServedEngine:
    """Starts no process. Raises ``ConfigError`` for settings that cannot work. The recipe refuses adapters."""
    assert setup.adapter is None
    return engine_of(setup, server_commands(setup, read_model_config(setup.model_path)), Transfer)
