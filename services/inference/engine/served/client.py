"""The interface of a server's client: one call with its request, tokens and end; and the HTTP that all clients share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import aiohttp
import numpy as np
import orjson

from services.common.aio import deadline
from services.common.errors import DeadlineError, InfrastructureError
from services.common.kept_tokens import KeptRow, kept_rows, left_out_row
from services.common.records import Sampling

PauseMode = Literal["retract", "in_place"]

CONNECT_TIMEOUT_S = 5.0
QUESTION_TIMEOUT_S = 15.0  # for calls that a server answers beside its work
CONTROL_TIMEOUT_S = 60.0  # for calls that wait for the running decoding step
UPDATE_TIMEOUT_S = 600.0  # reading a large model from shared memory or disk
_JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRequest:
    """One call of a server for one request: a continuation of ``input_ids``."""

    rid: str
    input_ids: Sequence[int]
    max_new_tokens: int
    sampling: Sampling  # only temperature, top_p, top_k and min_p are used
    stop_token_ids: Sequence[int]
    suppress_stop: bool  # none of the stop tokens can be drawn
    chunk_tokens: int  # tokens that come together
    adapter: str = ""  # its name at the server; empty: the server's own weights


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Tokens ``start`` to ``end`` of the call were computed with this version of the weights."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The reason of a call's end. ``message`` and ``status`` are an abortion's."""

    kind: Literal["stop", "length", "abort"]
    spans: tuple[VersionSpan, ...]
    message: str = ""
    status: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Tokens that have come since the last chunk, with their log-probabilities."""

    token_ids: list[int]
    logprobs: list[float]  # NaN where the server had none
    kept: list[KeptRow]  # the drawable tokens if the sampling is truncated; else empty
    cached_tokens: int  # of the call's input, taken from the server's cache
    finish: Finish | None


Reader = Callable[[dict[str, Any]], Chunk | None]  # one message of a stream; None if it completes no chunk


def kept_of(call: CallRequest, token_ids: Sequence[int], masks: Sequence[Sequence[int]]) -> list[KeptRow]:
    """The drawable tokens at each position: those in the masks where the sampling is cut, or all but the stop tokens."""
    if not call.sampling.is_truncated:
        return [left_out_row(call.stop_token_ids)] * len(token_ids) if call.suppress_stop else []
    if len(masks) != len(token_ids):
        raise ValueError(f"{len(token_ids)} tokens with {len(masks)} sampling masks")
    if not masks:
        return []
    counts = np.array([len(mask) for mask in masks], dtype=np.int64)
    ids = np.zeros((len(masks), int(counts.max())), dtype=np.int64)
    ids[np.arange(ids.shape[1]) < counts[:, None]] = [token for mask in masks for token in mask]
    return kept_rows(ids, counts, np.array(token_ids, dtype=np.int64))


def finish_of(kind: str, row: dict[str, Any], message: str = "", status: int | None = None) -> Finish:
    """The end of a call; ``row`` has the server's ``weight_versions``."""
    spans = tuple(
        VersionSpan(version=int(span["version"]), start=int(span["start"]), end=int(span["end"]))
        for span in row.get("weight_versions") or []
    )
    return Finish(
        kind="stop" if kind == "stop" else "length" if kind == "length" else "abort",
        spans=spans,
        message=message,
        status=status,
    )


class Refused(InfrastructureError):
    """The server answered, with a status that is no success. ``status`` is HTTP's."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message, status=str(status))
        self.status = status


class TokenStream:
    """The chunks of one server call. ``next`` may be cancelled and called again without loss."""

    def __init__(self, response: aiohttp.ClientResponse, read: Reader) -> None:
        self._response = response
        self._read = read
        self._buffer = bytearray()

    async def next(self) -> Chunk:
        """The next chunk. ``InfrastructureError`` when the stream breaks or makes no sense; ``InvalidRequestError``."""
        while True:
            end = self._buffer.find(b"\n\n")
            if end >= 0:
                line = bytes(self._buffer[:end])
                del self._buffer[: end + 2]
                if line.startswith(b"data: ") and (chunk := self._chunk(line[6:])) is not None:
                    return chunk
                continue
            try:
                more = await self._response.content.readany()
            except (aiohttp.ClientError, OSError) as error:
                raise InfrastructureError(f"the stream of tokens broke: {error!r}") from error
            if not more:
                raise InfrastructureError("the stream of tokens ended in the middle")
            self._buffer += more

    def _chunk(self, data: bytes) -> Chunk | None:
        try:
            return self._read(orjson.loads(data))
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, IndexError) as error:
            raise InfrastructureError(f"a chunk that makes no sense ({error!r}): {data[:200]!r}") from error


class ServerClient(ABC):
    """Client of one server at ``address`` (``http://host:port``), which requires ``key``.

    Calls raise ``InfrastructureError`` or ``DeadlineError`` without an answer, ``Refused`` after an answer that is no success.
    """

    program: ClassVar[str]
    generate_path: ClassVar[str]
    ready_path: ClassVar[str]

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
        """Close the session; open streams break."""
        for response in self._streaming:
            # Closing the session alone would drop the connections and leave the readers waiting for ever.
            response.content.set_exception(aiohttp.ClientConnectionError("the connection was closed here"))
        await self._session.close()

    @asynccontextmanager
    async def generate(self, call: CallRequest) -> AsyncIterator[TokenStream]:
        """Leaving the context before the end drops the connection, which ends the call at the server too."""
        if self.closed:
            raise InfrastructureError(f"the session with {self.address} is closed")
        try:
            response = await self._session.post(
                f"{self.address}{self.generate_path}", data=orjson.dumps(self.body(call)), headers=_JSON
            )
        except (aiohttp.ClientError, OSError) as error:
            raise InfrastructureError(f"{self.address} does not answer: {error!r}") from error
        self._streaming.add(response)
        try:
            if response.status >= 400:
                raise await self._refusal(response, self.generate_path)
            yield TokenStream(response, self.reader(call))
        finally:
            self._streaming.discard(response)
            response.close()

    # -- a program's own ----------------------------------------------------------------------------------------

    @abstractmethod
    def body(self, call: CallRequest) -> dict[str, Any]:
        """The body of a request for tokens."""

    @abstractmethod
    def reader(self, call: CallRequest) -> Reader:
        """Reads the messages of one call's stream."""

    @abstractmethod
    async def abort(self, rid: str) -> None:
        """End a call; its stream delivers the tokens so far."""

    @abstractmethod
    async def abort_all(self) -> None:
        """End every call; their streams deliver the tokens so far."""

    @abstractmethod
    async def pause(self, mode: PauseMode) -> None:
        """Return when no decoding step runs. ``retract`` frees the KV cache of running requests, ``in_place`` keeps the cache."""

    @abstractmethod
    async def resume(self) -> None: ...

    @abstractmethod
    async def update_from_disk(self, directory: str, version: int, *, flush: bool) -> None:
        """Read every tensor of a directory's safetensors files. After a failure the weights may have changed or not."""

    @abstractmethod
    async def is_generating(self, timeout_s: float) -> bool:
        """Whether the server generates; an idle server is asked for one token. False for a paused server too."""

    # -- the same for all programs ------------------------------------------------------------------------------

    async def is_ready(self) -> bool:
        """Whether the server has started and takes requests; False while its port is closed."""
        return await self._succeeds("GET", self.ready_path, QUESTION_TIMEOUT_S)

    async def _succeeds(self, method: str, path: str, timeout_s: float, data: bytes | None = None) -> bool:
        try:
            await self._ask(method, path, timeout_s, data)
        except (InfrastructureError, DeadlineError):
            return False
        return True

    # -- HTTP ---------------------------------------------------------------------------------------------------

    async def _post(self, path: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        return _as_object(await self._ask("POST", path, timeout_s, orjson.dumps(body)))

    async def _get(self, path: str, timeout_s: float) -> dict[str, Any]:
        return _as_object(await self._ask("GET", path, timeout_s))

    async def _ask(self, method: str, path: str, timeout_s: float, data: bytes | None = None) -> bytes:
        headers = _JSON if data is not None else {}
        try:
            async with deadline(timeout_s, f"{path} of the {self.program} server at {self.address}"):
                async with self._session.request(
                    method, f"{self.address}{path}", data=data, headers=headers
                ) as response:
                    if response.status >= 400:
                        raise await self._refusal(response, path)
                    return await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise InfrastructureError(f"{self.address} does not answer {path}: {error!r}") from error

    async def _refusal(self, response: aiohttp.ClientResponse, path: str) -> Refused:
        text = (await response.text(errors="replace"))[:500]
        return Refused(f"{self.program} refused {path} with {response.status}: {text}", response.status)


def _as_object(text: bytes) -> dict[str, Any]:
    try:
        answer = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {}  # some answers are plain text or empty
    return answer if isinstance(answer, dict) else {}
