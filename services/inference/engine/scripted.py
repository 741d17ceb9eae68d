"""An engine without a model: a script chooses the tokens, a clock determines their times.

For tests, simulations and benchmarks of the parts around the engine. Content, log-probabilities and latency are
pure functions of the request and the settings, and a request of a thousand tokens costs a few dozen microseconds.
Slots, weight versions, pause, abort and the context limit work as in the torch engine. Importing this module does not
import torch.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from services.common.errors import InfrastructureError, InvalidRequestError
from services.common.importing import check_call, load_object
from services.common.records import Logprobs, Segment, TokenIds
from services.inference.engine.base import (
    EngineHealth,
    FinishReason,
    Generation,
    GenerationRequest,
    KvPolicy,
    ScoreRequest,
    WeightUpdate,
    check_request,
    check_score_request,
    check_update,
)

Script = Callable[[GenerationRequest], Sequence[int] | npt.NDArray[np.integer[Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomTokens:
    """The default script: uniform tokens, log-normal length, then the request's first stop token.

    A pure function of the request's seed (its id where there is none), its prompt and these settings.
    """

    vocab_size: int = 512
    median_length: float = 200.0  # tokens, with the stop token
    sigma: float = 0.6  # of the logarithm of the length; 0 makes all lengths equal
    seed: int = 0

    def __call__(self, request: GenerationRequest) -> TokenIds:
        identity = request.request_id if request.seed is None else str(request.seed)
        digest = xxhash.xxh3_64(np.asarray(request.prompt_ids, dtype=np.int32).tobytes(), seed=self.seed)
        digest.update(identity.encode())
        random = np.random.Generator(np.random.PCG64(digest.intdigest()))
        length = max(1, round(math.exp(math.log(self.median_length) + self.sigma * random.standard_normal())))
        tokens = random.integers(0, self.vocab_size, size=min(length, request.sampling.max_new_tokens), dtype=np.int32)
        if request.stop_token_ids:
            stop = request.stop_token_ids[0]
            tokens[np.isin(tokens, request.stop_token_ids)] = (max(request.stop_token_ids) + 1) % self.vocab_size
            if length <= request.sampling.max_new_tokens:
                tokens[-1] = stop
        return tokens


@dataclass(slots=True, eq=False)
class _Entry:
    request: GenerationRequest
    tokens: TokenIds  # all tokens of the response
    finish_reason: FinishReason
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    started_at: float = math.inf  # on the engine's clock; infinite while waiting for a slot
    marks: list[tuple[int, int, bool]] = field(default_factory=list)  # (first token, version, mixed cache)
    aborted: bool = False


class ScriptedEngine:
    """``script`` is a function of the request, or its import path ``package.module:name``; ``tokens_per_second`` 0 means at once."""

    def __init__(
        self,
        script: Script | str | None = None,
        *,
        num_slots: int = 64,
        context_length: int = 32768,
        tokens_per_second: float = 0.0,  # of each request
        latency_s: float = 0.0,  # before a request's first token
        kv_policy: KvPolicy = KvPolicy.RECOMPUTE,
        version: int = 0,
        shapes: Mapping[str, Any] | None = None,  # when given, update() checks names and shapes against it
        on_tokens: Callable[[int, float], None] | None = None,  # called when a request ends
    ) -> None:
        self._script: Script = load_object(script) if isinstance(script, str) else (script or RandomTokens())
        check_call(self._script, f"script {script!r}", "def script(request) -> Sequence[int]", "request")
        self._num_slots = num_slots
        self._context_length = context_length
        self._tokens_per_second = tokens_per_second or math.inf
        self._latency_s = latency_s
        self._kv_policy = kv_policy
        self._version = version
        self._shapes = shapes
        self._on_tokens = on_tokens
        self._failure: str | None = "the engine is not started"
        self._by_id: dict[str, _Entry] = {}
        self._waiting: deque[_Entry] = deque()
        self._running: set[_Entry] = set()
        self._paused_at: float | None = None
        self._paused_for = 0.0
        self._generated = 0

    async def start(self) -> None:
        self._failure = None

    async def generate(self, request: GenerationRequest) -> Generation:
        entry = self._admit(request)
        try:
            while not entry.aborted and (remaining := self._remaining(entry)) > 0:
                entry.changed.clear()
                try:
                    async with asyncio.timeout(None if math.isinf(remaining) else remaining):
                        await entry.changed.wait()
                except TimeoutError:
                    pass  # the timer has fired
                if self._failure is not None:
                    raise InfrastructureError(f"engine: {self._failure}")
            return self._result(entry)
        finally:
            self._release(entry)

    async def score(self, request: ScoreRequest) -> Logprobs:
        """A fixed function of each token and its predecessor, in (-3, 0)."""
        if self._failure is not None:
            raise InfrastructureError(f"engine: {self._failure}")
        check_score_request(request, context_length=self._context_length)
        tokens = request.token_ids.astype(np.int64)
        tokens[1:] += 31 * tokens[:-1]
        return scripted_logprobs(tokens)[request.positions]

    async def abort(self, request_id: str) -> None:
        if entry := self._by_id.get(request_id):
            entry.aborted = True
            entry.changed.set()

    async def pause(self) -> None:
        if self._paused_at is None:
            self._paused_at = self._clock()
            self._wake()

    async def resume(self) -> None:
        if self._paused_at is not None:
            self._paused_for = time.monotonic() - self._paused_at
            self._paused_at = None
            self._wake()

    async def update(self, update: WeightUpdate) -> float:
        if self._shapes is not None:
            check_update(update, self._shapes)
        version = self._version = update.version
        for entry in self._running:
            emitted = self._num_emitted(entry)
            entry.marks.append((emitted, version, self._kv_policy is KvPolicy.KEEP))
        return 0.0

    async def flush(self) -> None:
        """Without effect: this engine has no cache."""

    async def release(self) -> None:
        await self.pause()

    async def restore(self, update: WeightUpdate) -> None:
        if update.version != self._version:
            await self.update(update)
        await self.resume()

    @property
    def version(self) -> int:
        return self._version

    def health(self) -> EngineHealth:
        return EngineHealth(
            ok=self._failure is None,
            detail=self._failure or ("paused" if self._paused_at is not None else "running"),
            running=len(self._running),
            waiting=len(self._waiting),
            free_slots=self._num_slots - len(self._running),
            generated_tokens=self._generated + sum(self._num_emitted(entry) for entry in self._running),
        )

    async def stop(self) -> None:
        self._failure = "the engine is stopped"
        self._wake()

    # -- the life of a request ---------------------------------------------------------------------------------

    def _admit(self, request: GenerationRequest) -> _Entry:
        if self._failure is not None:
            raise InfrastructureError(f"engine: {self._failure}")
        if request.request_id in self._by_id:
            raise InvalidRequestError(f"request {request.request_id!r} is already being generated")
        check_request(request, context_length=self._context_length)
        if request.sampling.is_truncated and request.record_kept:
            raise InvalidRequestError(
                f"request {request.request_id!r}: a scripted engine cannot tell which tokens top_k, top_p and min_p keep; "
                "write engine: torch, or top_p 1, top_k 0 and min_p 0"
            )
        tokens, finish_reason = self._script_tokens(request)
        entry = _Entry(request=request, tokens=tokens, finish_reason=finish_reason)
        self._by_id[request.request_id] = entry
        self._waiting.append(entry)
        self._fill_slots()
        return entry

    def _script_tokens(self, request: GenerationRequest) -> tuple[TokenIds, FinishReason]:
        """The script's tokens up to the first stop token, the budget, or the context."""
        tokens = np.asarray(self._script(request), dtype=np.int32)
        finish_reason = FinishReason.STOP
        stops = np.flatnonzero(np.isin(tokens, request.stop_token_ids))
        stops = stops[stops >= request.sampling.min_new_tokens]
        if len(stops):
            tokens = tokens[: stops[0] + 1]
        room = min(request.sampling.max_new_tokens, self._context_length - len(request.prompt_ids))
        if len(tokens) > room or (len(tokens) == room and not len(stops)):
            tokens, finish_reason = tokens[:room], FinishReason.LENGTH
        return tokens, finish_reason

    def _fill_slots(self) -> None:
        while self._waiting and len(self._running) < self._num_slots:
            entry = self._waiting.popleft()
            entry.started_at = self._clock()
            entry.marks.append((0, self._version, False))
            self._running.add(entry)
            entry.changed.set()

    def _result(self, entry: _Entry) -> Generation:
        emitted = self._num_emitted(entry)
        tokens = entry.tokens[:emitted]
        logprobs = scripted_logprobs(tokens)
        ends = [start for start, _, _ in entry.marks[1:]] + [emitted]
        segments = tuple(
            Segment.policy(tokens[start:end], logprobs[start:end], version, mixed)
            for (start, version, mixed), end in zip(
                entry.marks, ends, strict=False
            )  # no marks: the request never had a slot
            if end > start
        )
        cut = entry.aborted and emitted < len(entry.tokens)
        self._generated += emitted
        if self._on_tokens is not None and emitted:
            self._on_tokens(emitted, time.time())
        return Generation(segments=segments, finish_reason=FinishReason.ABORTED if cut else entry.finish_reason)

    def _release(self, entry: _Entry) -> None:
        del self._by_id[entry.request.request_id]
        if entry in self._running:
            self._running.remove(entry)
            self._fill_slots()
        else:
            self._waiting.remove(entry)

    # -- time ---------------------------------------------------------------------------------------------------

    def _clock(self) -> float:
        """Seconds on the engine's clock, which stops during a pause."""
        return self._paused_at if self._paused_at is not None else time.monotonic() - self._paused_for

    def _remaining(self, entry: _Entry) -> float:
        """Real seconds until the entry is complete; infinite while paused or waiting for a slot."""
        if self._paused_at is not None or math.isinf(entry.started_at):
            return math.inf
        needed = self._latency_s + len(entry.tokens) / self._tokens_per_second
        return entry.started_at + needed - self._clock()

    def _num_emitted(self, entry: _Entry) -> int:
        elapsed = self._clock() - entry.started_at - self._latency_s
        if elapsed < 0:
            return 0
        if math.isinf(self._tokens_per_second):
            return len(entry.tokens)
        # The tolerance keeps the last token of a request whose timer fired on the very tick.
        return min(len(entry.tokens), int(elapsed * self._tokens_per_second + 1e-6))

    def _wake(self) -> None:
        for entry in self._by_id.values():
            entry.changed.set()


def scripted_logprobs(tokens: npt.NDArray[np.integer[Any]]) -> Logprobs:
    """A fixed function of token and place, in (-3, 0)."""
    mixed = tokens.astype(np.int64) * 2654435761 + np.arange(len(tokens), dtype=np.int64) * 40503
    return np.asarray(-0.05 - (mixed % 1021) / 1021 * 2.9, dtype=np.float32)
