"""SGLang's HTTP interface: the only file that speaks to a server. Written against 0.5.23.

What is asked of a server and what it answers, in our words. Knows nothing of processes, requests' lives or weights' ways.
Log-probabilities are those of the distribution that was drawn from: SGLang scales by the temperature, and where top-k,
top-p or min-p cut, its sampling mask carries the tokens that were left and the renormalised log-probability.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp
import numpy as np
import orjson

from services.common.aio import deadline
from services.common.config.sglang import MASK_TOKENS
from services.common.errors import DeadlineError, InfrastructureError, InvalidRequestError
from services.common.kept_tokens import KeptRow, kept_rows, left_out_row
from services.inference.engine.sglang.legs import Chunk, Finish, LegRequest, VersionSpan

PauseMode = Literal["retract", "in_place"]

CONNECT_TIMEOUT_S = 5.0
QUESTION_TIMEOUT_S = 15.0  # what a server answers beside its work
CONTROL_TIMEOUT_S = 60.0  # what waits for the decoding step that runs
UPDATE_TIMEOUT_S = 600.0  # reading a large model from shared memory or disk
_JSON = {"Content-Type": "application/json"}
_SUPPRESSED = -1e9  # added to a logit: a token that cannot be drawn


class Refused(InfrastructureError):
    """The server answered, with a status that is no success. ``status`` is HTTP's."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message, status=str(status))
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRow:
    """A tensor that is announced: its name, its type as torch names it, its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a server says of its work."""

    running: int
    waiting: int
    used_share: float  # of its KV cache
    most_running: int


class TokenStream:
    """The chunks of one leg. ``next`` may be cancelled and called again: nothing is lost."""

    def __init__(self, response: aiohttp.ClientResponse, leg: LegRequest) -> None:
        self._response = response
        self._leg = leg
        self._buffer = bytearray()

    async def next(self) -> Chunk:
        """The next chunk. ``InfrastructureError`` when the stream breaks or makes no sense; ``InvalidRequestError``."""
        while True:
            end = self._buffer.find(b"\n\n")
            if end >= 0:
                line = bytes(self._buffer[:end])
                del self._buffer[: end + 2]
                if line.startswith(b"data: "):
                    return self._chunk(line[6:])
                continue
            try:
                more = await self._response.content.readany()
            except (aiohttp.ClientError, OSError) as error:
                raise InfrastructureError(f"the stream of tokens broke: {error!r}") from error
            if not more:
                raise InfrastructureError("the stream of tokens ended in the middle")
            self._buffer += more

    def _chunk(self, data: bytes) -> Chunk:
        try:
            return _read_chunk(orjson.loads(data), self._leg)
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, IndexError) as error:
            raise InfrastructureError(f"a chunk that makes no sense ({error!r}): {data[:200]!r}") from error


class SglangClient:
    """One server at ``address`` (``http://host:port``), which answers those who know its ``key``.

    Calls raise ``InfrastructureError`` or ``DeadlineError`` without an answer.
    """

    def __init__(self, address: str, key: str) -> None:
        self.address = address
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)  # deadlines stand at the calls
        self._session = aiohttp.ClientSession(
            timeout=timeout,
            connector=aiohttp.TCPConnector(limit=0),
            headers={"Authorization": f"Bearer {key}"},
        )
        self._streaming: set[aiohttp.ClientResponse] = set()

    @property
    def closed(self) -> bool:
        return self._session.closed

    async def close(self) -> None:
        """Streams that are open break with it."""
        for response in self._streaming:
            # Closing the session drops their connections, and leaves whoever reads waiting for ever.
            response.content.set_exception(aiohttp.ClientConnectionError("the connection was closed here"))
        await self._session.close()

    # -- generating ---------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def generate(self, leg: LegRequest) -> AsyncIterator[TokenStream]:
        """Leaving the context before the end drops the connection, which ends the leg at the server too."""
        try:
            response = await self._session.post(
                f"{self.address}/generate", data=orjson.dumps(_leg_body(leg)), headers=_JSON
            )
        except (aiohttp.ClientError, OSError) as error:
            raise InfrastructureError(f"{self.address} does not answer: {error!r}") from error
        self._streaming.add(response)
        try:
            if response.status >= 400:
                raise await _refusal(response, "/generate")
            yield TokenStream(response, leg)
        finally:
            self._streaming.discard(response)
            response.close()

    async def abort(self, rid: str) -> None:
        """End a leg; its stream brings what it has."""
        await self._post("/abort_request", {"rid": rid}, CONTROL_TIMEOUT_S)

    # -- control ------------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode) -> None:
        """Return when no decoding step is running. ``retract`` gives the KV cache of what runs back, ``in_place`` keeps it."""
        await self._post("/pause_generation", {"mode": mode}, CONTROL_TIMEOUT_S)
        # Answered by the scheduler, after it has read the line above.
        await self._get("/server_info", CONTROL_TIMEOUT_S)

    async def resume(self) -> None:
        await self._post("/continue_generation", {"torch_empty_cache": False}, CONTROL_TIMEOUT_S)

    async def flush(self) -> None:
        """Forget every cached prefix; ``Refused`` while requests run."""
        await self._post("/flush_cache", {}, CONTROL_TIMEOUT_S)

    async def update_from_disk(self, directory: str, version: int, *, flush: bool) -> None:
        """Read every tensor of a directory's safetensors files. ``Refused`` leaves it open whether the weights changed."""
        body = {
            "model_path": directory,
            "load_format": "safetensors",
            "weight_version": str(version),
            "flush_cache": flush,
        }
        await self._post("/update_weights_from_disk", body, UPDATE_TIMEOUT_S)

    async def join_group(self, name: str, port: int, num_ranks: int, timeout_s: float) -> None:
        """Have the server's ranks join a gloo group as 1, 2, ... of ``num_ranks``, by the store at a port of this machine."""
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
        """Open the session that updates by a group want; ``Refused`` when one is open."""
        await self._post("/begin_weight_update", {}, CONTROL_TIMEOUT_S)

    async def update_from_group(self, group: str, rows: Sequence[TensorRow], version: int, *, flush: bool) -> None:
        """Receive these tensors, one broadcast each. ``Refused`` leaves it open whether the weights changed."""
        body = {
            "names": [row.name for row in rows],
            "dtypes": [row.dtype for row in rows],
            "shapes": [list(row.shape) for row in rows],
            "group_name": group,
            "weight_version": str(version),
            "flush_cache": flush,
        }
        await self._post("/update_weights_from_distributed", body, UPDATE_TIMEOUT_S)

    async def end_update(self) -> None:
        await self._post("/end_weight_update", {}, CONTROL_TIMEOUT_S)

    # -- questions ----------------------------------------------------------------------------------------------

    async def weight_version(self) -> int | None:
        """The version that the server names as its own; None when it is no number."""
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
            most_running=sum(int(rank.get("max_running_requests", 0)) for rank in ranks),
        )

    async def is_ready(self) -> bool:
        """Whether it has started and takes requests; False while nobody listens."""
        try:
            await self._get("/ready", QUESTION_TIMEOUT_S)
        except (InfrastructureError, DeadlineError):
            return False
        return True

    async def is_generating(self, timeout_s: float) -> bool:
        """Whether the scheduler gives tokens: it is asked for one when nothing runs. False for a paused server too."""
        try:
            await self._get("/health_generate", timeout_s)
        except (InfrastructureError, DeadlineError):
            return False
        return True

    # -- HTTP ---------------------------------------------------------------------------------------------------

    async def _post(self, path: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        return await self._ask("POST", path, timeout_s, orjson.dumps(body))

    async def _get(self, path: str, timeout_s: float) -> dict[str, Any]:
        return await self._ask("GET", path, timeout_s)

    async def _ask(self, method: str, path: str, timeout_s: float, data: bytes | None = None) -> dict[str, Any]:
        headers = _JSON if data is not None else {}
        try:
            async with deadline(timeout_s, f"{path} of the SGLang server at {self.address}"):
                async with self._session.request(
                    method, f"{self.address}{path}", data=data, headers=headers
                ) as response:
                    if response.status >= 400:
                        raise await _refusal(response, path)
                    text = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise InfrastructureError(f"{self.address} does not answer {path}: {error!r}") from error
        try:
            answer = orjson.loads(text)
        except orjson.JSONDecodeError:
            return {}  # some answers are a line of text, or empty
        return answer if isinstance(answer, dict) else {}


async def _refusal(response: aiohttp.ClientResponse, path: str) -> Refused:
    text = (await response.text(errors="replace"))[:500]
    return Refused(f"SGLang refused {path} with {response.status}: {text}", response.status)


def _leg_body(leg: LegRequest) -> dict[str, Any]:
    """What ``/generate`` takes."""
    sampling, masked = leg.sampling, leg.sampling.is_truncated
    parameters: dict[str, Any] = {
        "temperature": sampling.temperature,
        "max_new_tokens": leg.max_new_tokens,
        "stream_interval": leg.chunk_tokens,
    }
    if masked:
        top_k = sampling.top_k or MASK_TOKENS
        parameters |= {"top_p": sampling.top_p, "top_k": top_k, "min_p": sampling.min_p}
    if leg.suppress_stop or not leg.stop_token_ids:
        parameters["ignore_eos"] = True
    else:
        parameters["stop_token_ids"] = list(leg.stop_token_ids)
    if leg.suppress_stop:
        parameters["logit_bias"] = {str(token): _SUPPRESSED for token in leg.stop_token_ids}
    body: dict[str, Any] = {
        "rid": leg.rid,
        "input_ids": list(leg.input_ids),
        "sampling_params": parameters,
        "return_logprob": True,
        "stream": True,
    }
    if masked:
        body |= {"return_sampling_mask": True, "sampling_logprobs_mode": "selected"}
    return body


def _read_chunk(row: dict[str, Any], leg: LegRequest) -> Chunk:
    if (error := row.get("error")) is not None:
        message = error.get("message", "") if isinstance(error, dict) else str(error)
        raise InvalidRequestError(f"SGLang refuses the request: {message}")
    meta, masked = row["meta_info"], leg.sampling.is_truncated
    token_ids = [int(token) for token in row["output_ids"]]
    pairs = meta.get("output_token_logprobs") or []
    values = meta.get("output_token_sampling_logprobs") or [] if masked else [pair[0] for pair in pairs]
    if [int(pair[1]) for pair in pairs] != token_ids or len(values) != len(token_ids):
        raise ValueError(f"{len(token_ids)} tokens with {len(pairs)} and {len(values)} log-probabilities")
    logprobs = [math.nan if value is None else float(value) for value in values]
    return Chunk(
        token_ids=token_ids,
        logprobs=logprobs,
        kept=_kept(meta, leg, token_ids),
        cached_tokens=int(meta.get("cached_tokens") or 0),
        finish=_read_finish(meta),
    )


def _kept(meta: dict[str, Any], leg: LegRequest, token_ids: list[int]) -> list[KeptRow]:
    """Which tokens could be drawn, of each token: those in the server's mask, or all but the stop tokens."""
    if not leg.sampling.is_truncated:
        return [left_out_row(leg.stop_token_ids)] * len(token_ids) if leg.suppress_stop else []
    masks: list[list[int]] = meta.get("output_token_sampling_mask") or []
    if len(masks) != len(token_ids):
        raise ValueError(f"{len(token_ids)} tokens with {len(masks)} sampling masks")
    if not masks:
        return []
    counts = np.array([len(mask) for mask in masks], dtype=np.int64)
    ids = np.zeros((len(masks), int(counts.max())), dtype=np.int64)
    ids[np.arange(ids.shape[1]) < counts[:, None]] = [token for mask in masks for token in mask]
    return kept_rows(ids, counts, np.array(token_ids, dtype=np.int64))


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
