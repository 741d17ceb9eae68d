"""Client of SGLang's HTTP interface, the only file that calls a server. Written against 0.5.23.

Converts requests and answers to the project's types; independent of processes, request state and weight transfer.
Log-probabilities are those of the sampling distribution: SGLang scales by the temperature, and where top-k, top-p or min-p
cut, its sampling mask has the kept tokens and the renormalised log-probability.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from services.common.config.processes.servers import MASK_TOKENS
from services.common.errors import DeadlineError, InfrastructureError, InvalidRequestError
from services.common.records.kept_tokens import KeptRow, left_out_row
from services.inference.engine.served.client import (
    CONTROL_TIMEOUT_S,
    QUESTION_TIMEOUT_S,
    UPDATE_TIMEOUT_S,
    CallRequest,
    Chunk,
    Finish,
    Load,
    PauseMode,
    Reader,
    ServerClient,
    VersionSpan,
    rows_of_masks,
)

_SUPPRESSED = -1e9  # added to a logit: a token that cannot be drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRow:
    """An announced tensor: its name, its type in torch's notation, its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class SglangClient(ServerClient):
    """Client of one SGLang server. ``devices`` of its ranks, in torch's notation, as this process sees them."""

    program = "SGLang"
    generate_path = "/generate"

    def __init__(self, address: str, key: str, *, devices: Sequence[str] = ("cpu",)) -> None:
        super().__init__(address, key)
        self.devices = tuple(devices)

    def body(self, call: CallRequest) -> dict[str, Any]:
        return _request_body(call)

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

    async def flush(self) -> None:
        """Forget every cached prefix; ``Refused`` while requests run."""
        await self._post("/flush_cache", {}, CONTROL_TIMEOUT_S)

    async def update_from_disk(self, directory: str, version: int, *, flush: bool) -> None:
        """Read every tensor of a directory's safetensors files. After ``Refused`` the weights may have changed or not."""
        body = {
            "model_path": directory,
            "load_format": "safetensors",
            "weight_version": str(version),
            "flush_cache": flush,
        }
        await self._post("/update_weights_from_disk", body, UPDATE_TIMEOUT_S)

    async def join_group(self, name: str, port: int, num_ranks: int, timeout_s: float) -> None:
        """Make the server's ranks join a gloo group as 1, 2, ... of ``num_ranks``, through the store at a port of this machine."""
        body = {
            "master_address": "127.0.0.1",
            "master_port": port,
            "rank_offset": 1,
            "world_size": num_ranks,
            "group_name": name,
            "backend": "gloo",
        }
        await self._post("/init_weights_update_group", body, timeout_s)

    async def begin_update(self) -> None:
        """Open the session for updates by a group; ``Refused`` if one is open."""
        await self._post("/begin_weight_update", {}, CONTROL_TIMEOUT_S)

    async def update_from_group(self, group: str, rows: Sequence[TensorRow], version: int, *, flush: bool) -> None:
        """Receive these tensors, one broadcast each. After ``Refused`` the weights may have changed or not."""
        body = {
            "names": [row.name for row in rows],
            "dtypes": [row.dtype for row in rows],
            "shapes": [list(row.shape) for row in rows],
            "group_name": group,
            "weight_version": str(version),
            "flush_cache": flush,
        }
        await self._post("/update_weights_from_distributed", body, UPDATE_TIMEOUT_S)

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

    async def weight_version(self) -> int | None:
        """The version that the server reports; None if the report is not a number."""
        answer = await self._get("/model_info", QUESTION_TIMEOUT_S)
        name = str(answer.get("weight_version"))
        return int(name) if name.isdecimal() else None

    async def load(self) -> Load:
        answer = await self._get("/v1/loads?include=core", QUESTION_TIMEOUT_S)
        ranks = answer.get("loads") or [{}]
        return Load(
            running=sum(int(rank.get("num_running_reqs", 0)) for rank in ranks),
            waiting=sum(int(rank.get("num_waiting_reqs", 0)) for rank in ranks),
            used_share=max(float(rank.get("token_usage", 0.0)) for rank in ranks),
        )

    async def is_ready(self) -> bool:
        """Whether the server has started and takes requests; False while its port is closed."""
        try:
            await self._get("/ready", QUESTION_TIMEOUT_S)
        except (InfrastructureError, DeadlineError):
            return False
        return True

    async def is_generating(self, timeout_s: float) -> bool:
        """Whether the scheduler generates; an idle server is asked for one token. False for a paused server too."""
        try:
            await self._get("/health_generate", timeout_s)
        except (InfrastructureError, DeadlineError):
            return False
        return True


def _request_body(call: CallRequest) -> dict[str, Any]:
    """The body of a request to ``/generate``."""
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
        kept=_kept(meta, call, token_ids),
        cached_tokens=int(meta.get("cached_tokens") or 0),
        finish=_read_finish(meta),
    )


def _kept(meta: dict[str, Any], call: CallRequest, token_ids: list[int]) -> list[KeptRow]:
    """The drawable tokens at each position: those in the server's mask, or all but the stop tokens."""
    if not call.sampling.is_truncated:
        return [left_out_row(call.stop_token_ids)] * len(token_ids) if call.suppress_stop else []
    masks: list[list[int]] = meta.get("output_token_sampling_mask") or []
    if len(masks) != len(token_ids):
        raise ValueError(f"{len(token_ids)} tokens with {len(masks)} sampling masks")
    return rows_of_masks(masks, token_ids)


def _read_finish(meta: dict[str, Any]) -> Finish | None:
    reason = meta.get("finish_reason")
    if reason is None:
        return None
    spans = tuple(
        VersionSpan(version=int(span["version"]), start=int(span["start"]), end=int(span["end"]))
        for span in meta.get("weight_versions") or []
    )
    matched = reason.get("matched")
    return Finish(
        kind=reason["type"],
        spans=spans,
        matched=matched if isinstance(matched, int) else None,
        message=str(reason.get("message") or ""),
        status=reason.get("status_code"),
    )
