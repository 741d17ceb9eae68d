"""SGLang: its HTTP interface (only here), the command line of its servers, and the engine over them. Written against 0.5.23.

Log-probabilities are those of the sampling distribution: SGLang scales by the temperature, and where top-k, top-p or min-p
cut, its sampling mask has the kept tokens and the renormalised log-probability. ``tensors`` has the way of an update
that needs torch.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from extras.sglang import server
from services.common.config.processes import MASK_TOKENS
from services.common.errors import DeadlineError, InfrastructureError, InvalidRequestError
from services.common.export import ADAPTER_WEIGHTS, PEFT_CONFIG, adapter_files
from services.inference.engine.served.client import (
    CONTROL_TIMEOUT_S,
    UPDATE_TIMEOUT_S,
    CallRequest,
    Chunk,
    Finish,
    PauseMode,
    Reader,
    ServerClient,
    finish_of,
    kept_of,
)
from services.inference.engine.served.engine import ServedEngine, ServedSetup, commands_of, engine_of
from services.inference.engine.served.fleet import Transfer
from services.inference.engine.served.process import (
    Program,
    ServerCommand,
    hints_of,
    own_arguments,
    runs_on_cpu,
    spelled,
)
from services.inference.engine.served.stage import FILE, Stage

log = structlog.get_logger(__name__)

_SUPPRESSED = -1e9  # added to a logit: a token that cannot be drawn


class SglangClient(ServerClient):
    """Client of one SGLang server. ``devices`` of its ranks, in torch's notation, as this process sees them."""

    program = "SGLang"
    generate_path = "/generate"
    ready_path = "/ready"

    def __init__(self, address: str, key: str, *, devices: Sequence[str] = ("cpu",)) -> None:
        super().__init__(address, key)
        self.devices = tuple(devices)

    def body(self, call: CallRequest) -> dict[str, Any]:
        sampling, masked = call.sampling, call.sampling.is_truncated
        parameters: dict[str, Any] = {
            "temperature": sampling.temperature,
            "max_new_tokens": call.max_new_tokens,
            "stream_interval": call.chunk_tokens,
        }
        if masked:
            top_k = sampling.top_k or MASK_TOKENS
            parameters |= {"top_p": sampling.top_p, "top_k": top_k, "min_p": sampling.min_p}
        if call.suppress_stop or not call.stop_token_ids:
            parameters["ignore_eos"] = True
        else:
            parameters["stop_token_ids"] = list(call.stop_token_ids)
        if call.suppress_stop:
            parameters["logit_bias"] = {str(token): _SUPPRESSED for token in call.stop_token_ids}
        body: dict[str, Any] = {
            "rid": call.rid,
            "input_ids": list(call.input_ids),
            "sampling_params": parameters,
            "return_logprob": True,
            "stream": True,
        }
        if call.adapter:
            body["lora_path"] = call.adapter
        if masked:
            body |= {"return_sampling_mask": True, "sampling_logprobs_mode": "selected"}
        return body

    def reader(self, call: CallRequest) -> Reader:
        return partial(_read_chunk, call)

    async def abort_all(self) -> None:
        """End every call; their streams deliver the tokens so far."""
        await self._post("/abort_request", {"rid": "", "abort_all": True}, CONTROL_TIMEOUT_S)

    async def abort(self, rid: str) -> None:
        """End a call; its stream delivers the tokens so far."""
        await self._post("/abort_request", {"rid": rid}, CONTROL_TIMEOUT_S)

    # -- control ------------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode) -> None:
        """Return when no decoding step runs. ``retract`` frees the KV cache of running requests, ``in_place`` keeps the cache."""
        await self._post("/pause_generation", {"mode": mode}, CONTROL_TIMEOUT_S)
        # The scheduler answers this call after the call above.
        await self._get("/server_info", CONTROL_TIMEOUT_S)

    async def resume(self) -> None:
        await self._post("/continue_generation", {"torch_empty_cache": False}, CONTROL_TIMEOUT_S)

    async def update_from_disk(self, directory: str, version: int, *, flush: bool) -> None:
        """Read every tensor of a directory's safetensors files. After ``Refused`` the weights may have changed or not."""
        body = {
            "model_path": directory,
            "load_format": "safetensors",
            "weight_version": str(version),
            "flush_cache": flush,
        }
        await self._post("/update_weights_from_disk", body, UPDATE_TIMEOUT_S)

    async def begin_update(self) -> None:
        """Open the session of an update; ``Refused`` if one is open."""
        await self._post("/begin_weight_update", {}, CONTROL_TIMEOUT_S)

    async def update_from_tensors(self, payloads: Sequence[str], version: int, *, flush: bool) -> None:
        """Copy tensors that lie in the memory of the ranks; one payload of handles for each rank. After ``Refused`` the weights
        may have changed or not."""
        body = {
            "serialized_named_tensors": list(payloads),
            "load_format": None,
            "flush_cache": flush,
            "weight_version": str(version),
        }
        await self._post("/update_weights_from_tensor", body, UPDATE_TIMEOUT_S)

    async def load_adapter(self, name: str, directory: str) -> None:
        """Read an adapter in PEFT's format. After ``Refused`` the server may hold the name or not."""
        await self._post("/load_lora_adapter", {"lora_name": name, "lora_path": directory}, UPDATE_TIMEOUT_S)

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter; the server answers when no call uses it."""
        await self._post("/unload_lora_adapter", {"lora_name": name}, CONTROL_TIMEOUT_S)

    async def end_update(self) -> None:
        await self._post("/end_weight_update", {}, CONTROL_TIMEOUT_S)

    # -- questions ----------------------------------------------------------------------------------------------

    async def is_generating(self, timeout_s: float) -> bool:
        return await self._succeeds("GET", "/health_generate", timeout_s)


def _read_chunk(call: CallRequest, row: dict[str, Any]) -> Chunk:
    if (error := row.get("error")) is not None:
        message = error.get("message", "") if isinstance(error, dict) else str(error)
        raise InvalidRequestError(f"SGLang refuses the request: {message}")
    meta, masked = row["meta_info"], call.sampling.is_truncated
    token_ids = [int(token) for token in row["output_ids"]]
    pairs = meta.get("output_token_logprobs") or []
    values = meta.get("output_token_sampling_logprobs") or [] if masked else [pair[0] for pair in pairs]
    if [int(pair[1]) for pair in pairs] != token_ids or len(values) != len(token_ids):
        raise ValueError(f"{len(token_ids)} tokens with {len(pairs)} and {len(values)} log-probabilities")
    logprobs = [math.nan if value is None else float(value) for value in values]
    return Chunk(
        token_ids=token_ids,
        logprobs=logprobs,
        kept=kept_of(call, token_ids, meta.get("output_token_sampling_mask") or []),
        cached_tokens=int(meta.get("cached_tokens") or 0),
        finish=_read_finish(meta),
    )


def _read_finish(meta: dict[str, Any]) -> Finish | None:
    reason = meta.get("finish_reason")
    if reason is None:
        return None
    message = str(reason.get("message") or "")
    return finish_of(reason["type"], meta, message, reason.get("status_code"))


LOADED_AT_ONCE = 2  # the current version and the one before, whose last calls may still end
_numbers = itertools.count()


class AdapterTransfer(Transfer):
    """Loads versions of an adapter into a server, each under a name of its own, beside the base that the server has loaded.

    A call names its adapter, and never moves to another version while the call runs. After a load the engine ends the
    running calls with the tokens that they have, and goes on with the new name; SGLang's prefix cache is apart for each name.

    SGLang reads an adapter again under an unloaded name. So each load has a directory of its own, removed after the server
    has read the directory: a server without a version refuses calls for this version.

    ``files`` are PEFT's files beside the weights; the stage has the weights.
    """

    way = "adapter"

    def __init__(self, stage: Stage, files: Mapping[str, bytes]) -> None:
        super().__init__(stage)
        self._config = files[PEFT_CONFIG]
        self._loaded: dict[SglangClient, list[str]] = {}

    async def load(self, client: SglangClient, version: int, *, flush: bool) -> str:
        self._loaded = {known: names for known, names in self._loaded.items() if not known.closed}
        names = self._loaded.setdefault(client, [])
        while len(names) >= LOADED_AT_ONCE:
            await self._unload(client, names.pop(0))
        name = f"version-{version}-{next(_numbers)}"  # never used twice: a load in doubt is repeated under another
        directory = self.stage.directory / name
        try:
            await asyncio.to_thread(self._write, directory)
            await client.load_adapter(name, str(directory))
        finally:
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
        names.append(name)
        return name

    def _write(self, directory: Path) -> None:
        directory.mkdir(mode=0o700)
        shutil.copyfile(self.stage.directory / FILE, directory / ADAPTER_WEIGHTS)
        (directory / PEFT_CONFIG).write_bytes(self._config)

    async def _unload(self, client: SglangClient, name: str) -> None:
        try:
            await client.unload_adapter(name)
        except (InfrastructureError, DeadlineError) as error:  # it takes memory and is never named again
            log.warning("sglang.adapter_not_unloaded", server=client.address, adapter=name, error=error.message)


CONTEXT_MARGIN = 8  # tokens that a server keeps for itself at the end of its context
CPU_CACHE_TOKENS = 65536  # most tokens of a KV cache in host memory
_CPU_LAUNCHER = Path(server.__file__).resolve().with_name("launch.py")
_CPU_MEMORY_SHARE = 0.1
_ON_CPU: dict[str, str | int | float | bool] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "sleep_on_idle": True,
}
# Arguments that are never taken from `extra_arguments`: the engine relies on its own values.
OURS = (
    "model_path",
    "host",
    "port",
    "tp_size",
    "weight_version",
    "enable_lora",
    "lora_paths",
    "lora_target_modules",
    "max_lora_rank",
    "max_loaded_loras",
    "max_loras_per_batch",
    "skip_tokenizer_init",
    "incremental_streaming_output",
)


def sglang_program(devices: Sequence[str]) -> Program:
    """``devices`` of a server's ranks, in torch's notation, as this process sees them."""
    return Program(
        name="SGLang",
        section="sglang",
        connect=partial(SglangClient, devices=devices),
        arguments=lambda port, version, key_file: (
            *("--port", str(port), "--weight-version", str(version), "--config", str(key_file)),
        ),
        hints=hints_of("SGLang", "sglang", ()),
        port_taken=re.compile(r"error while attempting to bind on address .*already in use"),
    )


def server_commands(setup: ServedSetup, environment: Mapping[str, str] = os.environ) -> list[ServerCommand]:
    """Commands of the data-parallel servers of one policy.

    Raises:
        ConfigError: an extra argument that is not the recipe's to set, or fewer GPUs than the servers need.
    """
    config, settings, adapter = setup.config, setup.config.sglang, setup.adapter
    on_cpu, parallel = runs_on_cpu(config), settings.tensor_parallel
    most_running = settings.max_running_requests or config.num_slots
    arguments: dict[str, str | int | float | bool] = {
        "model_path": setup.model_path,
        "tp_size": parallel,
        "dtype": config.dtype,
        "context_length": setup.context_length + CONTEXT_MARGIN,
        "mem_fraction_static": _CPU_MEMORY_SHARE if on_cpu else settings.memory_share,
        "max_running_requests": most_running,
        "sampling_mask_max_tokens": MASK_TOKENS,
        "skip_tokenizer_init": True,
        "incremental_streaming_output": True,
        "log_level": "warning",
    }
    if config.kv_policy == "keep":
        # With two steps in flight at a pause in place, a server would report the new version for a token of the old one.
        arguments["disable_overlap_schedule"] = True
    if adapter is not None:
        arguments |= {
            "enable_lora": True,
            "max_lora_rank": adapter.rank,
            "max_loras_per_batch": LOADED_AT_ONCE + 1,  # and calls without an adapter, which check the server
        }
    if on_cpu:
        arguments |= _ON_CPU
        if adapter is not None:
            arguments["lora_backend"] = "torch_native"
        arguments["max_total_tokens"] = min(CPU_CACHE_TOKENS, most_running * (setup.context_length + CONTEXT_MARGIN))
    else:
        # Log-probabilities of bf16 logits are off by up to .03, which the ratio of a loss would take for staleness.
        arguments["enable_fp32_lm_head"] = True
    arguments |= own_arguments("sglang", settings.extra_arguments, OURS)
    launcher = [str(_CPU_LAUNCHER)] if on_cpu else ["-m", "sglang.launch_server"]
    targets = () if adapter is None else ("--lora-target-modules", *adapter.targets)
    words = (*launcher, *spelled(arguments), "--host", "127.0.0.1", *targets)
    env = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
    return commands_of(setup, words, sglang_program, env, environment)


def build_engine(setup: ServedSetup) -> ServedEngine:
    """Starts no process. Raises ``ConfigError`` for settings that cannot work."""
    return engine_of(setup, server_commands(setup), partial(_transfer, setup))


def _transfer(setup: ServedSetup, stage: Stage) -> Transfer:
    config = setup.config
    if setup.adapter is not None:
        return AdapterTransfer(stage, adapter_files(setup.adapter, setup.model_path, config.dtype, {}))
    if config.sglang.update == "disk":
        return Transfer(stage)
    from extras.sglang.tensors import TensorTransfer  # needs torch, which `disk` does not

    return TensorTransfer(stage)
