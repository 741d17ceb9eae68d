"""Client of vLLM's HTTP interface, the only file that calls a vLLM server. Written against 0.32.0.

Log-probabilities are those of the sampling distribution: the server is started with processed log-probabilities, after
temperature, top-k, top-p, min-p and forbidden tokens. Where these cut, the tokens that could be drawn are those of the
likeliest ones that have a finite log-probability.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import orjson

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
    Refused,
    ServerClient,
    VersionSpan,
    rows_of_masks,
)

_ID_PREFIX = "generate-tokens-"  # the server puts it before a request's id
_NOT_A_NUMBER = -9000.0  # the server writes -9999 for minus infinity and for NaN


class VllmClient(ServerClient):
    """Client of one vLLM server. ``most_kept``: tokens of a cut distribution that the server can list."""

    program = "vLLM"
    generate_path = "/inference/v1/generate"

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

    async def weight_version(self) -> int | None:
        answer = await self._get("/weight_info", QUESTION_TIMEOUT_S)
        name = str(answer.get("weight_version"))
        return int(name) if name.isdecimal() else None

    async def load(self) -> Load:
        text = (await self._ask("GET", "/metrics", QUESTION_TIMEOUT_S)).decode(errors="replace")
        return Load(
            running=int(sum(_metric(text, "vllm:num_requests_running"))),
            waiting=int(sum(_metric(text, "vllm:num_requests_waiting"))),
            used_share=max(_metric(text, "vllm:kv_cache_usage_perc"), default=0.0),
        )

    async def is_ready(self) -> bool:
        try:
            await self._get("/health", QUESTION_TIMEOUT_S)
        except (InfrastructureError, DeadlineError):
            return False
        return True

    async def is_generating(self, timeout_s: float) -> bool:
        parameters = {"max_tokens": 1, "temperature": 0.0, "detokenize": False}
        data = orjson.dumps({"token_ids": [0], "sampling_params": parameters})
        try:
            await self._ask("POST", self.generate_path, timeout_s, data)
        except (InfrastructureError, DeadlineError):
            return False
        return True


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
        return Chunk(
            token_ids=token_ids,
            logprobs=[value if value > _NOT_A_NUMBER else math.nan for value in logprobs],
            kept=self._kept(content, token_ids),
            cached_tokens=0,
            finish=_read_finish(choice),
        )

    def _kept(self, content: list[dict[str, Any]], token_ids: list[int]) -> list[KeptRow]:
        """The drawable tokens at each position: those with a finite log-probability, or all but the stop tokens."""
        call = self._call
        if not call.sampling.is_truncated:
            return [left_out_row(call.stop_token_ids)] * len(token_ids) if call.suppress_stop else []
        masks = [
            [int(top["token_id"]) for top in place["top_logprobs"] if top["logprob"] > _NOT_A_NUMBER]
            for place in content
        ]
        return rows_of_masks(masks, token_ids)


def _read_finish(choice: dict[str, Any]) -> Finish | None:
    reason = choice.get("finish_reason")
    if reason is None:
        return None
    spans = tuple(
        VersionSpan(version=int(span["version"]), start=int(span["start"]), end=int(span["end"]))
        for span in choice.get("weight_versions") or []
    )
    matched = choice.get("stop_reason")
    return Finish(
        kind=reason if reason in ("stop", "length") else "abort",
        spans=spans,
        matched=matched if isinstance(matched, int) else None,
        message="" if reason in ("stop", "length", "abort") else str(reason),
    )


def _raise(error: Any) -> None:
    message = str(error.get("message", "")) if isinstance(error, dict) else str(error)
    code = error.get("code") if isinstance(error, dict) else None
    if isinstance(code, int) and 400 <= code < 500:
        raise InvalidRequestError(f"vLLM refuses the request: {message}")
    raise InfrastructureError(f"vLLM ended the call: {message}")


def _metric(text: str, name: str) -> list[float]:
    """The values of a metric in Prometheus' format, one per engine core."""
    lines = [line for line in text.splitlines() if line.startswith((name + "{", name + " "))]
    return [float(line.rsplit(" ", 1)[1]) for line in lines]
