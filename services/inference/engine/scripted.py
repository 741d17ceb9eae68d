"""An engine without a model: a script chooses the tokens, a clock determines their times.

For tests, simulations and benchmarks of the parts around the engine. Content, log-probabilities and latency are
pure functions of the request and the settings, and a request of a thousand tokens costs a few dozen microseconds.
Slots, weight versions and the context limit work as in the torch engine. Importing this module does not
import torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import xxhash

from services.common.errors import InfrastructureError
from services.common.importing import check_call, load_object
from services.common.records import Logprobs, TokenIds
from services.inference.engine.base import (
    EngineHealth,
    FinishReason,
    Generation,
    GenerationRequest,
    KvPolicy,
    ScoreRequest,
    WeightUpdate,
    check_score_request,
    check_update,
)
from services.inference.engine.streaming import EngineSetup, Live, StreamingEngine

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
class _Play:
    """A request in a slot."""

    live: Live
    tokens: TokenIds  # all tokens of the response
    begins_at: float  # on the engine's clock: the first token begins


class ScriptedEngine(StreamingEngine):
    """``script`` is a function of the request, or its import path ``package.module:name``; ``tokens_per_second`` 0 means at once."""

    has_weights: ClassVar[bool] = False

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
        super().__init__(
            EngineSetup(
                policy="", context_length=context_length, num_slots=num_slots, version=version, on_tokens=on_tokens
            )
        )
        self._script: Script = load_object(script) if isinstance(script, str) else (script or RandomTokens())
        check_call(self._script, f"script {script!r}", "def script(request) -> Sequence[int]", "request")
        self._tokens_per_second = tokens_per_second or math.inf
        self._latency_s = latency_s
        self._shapes = shapes
        self.recomputes = kv_policy is KvPolicy.RECOMPUTE
        self._plays: set[_Play] = set()
        self._released_at: float | None = None
        self._stood_still_s = 0.0
        self._news = asyncio.Event()  # the clock goes on, or the engine is stopped

    async def _play(self, request: GenerationRequest, live: Live) -> Generation:
        tokens, end = self._script_tokens(request)
        play = _Play(live, tokens, self._clock() + self._latency_s)
        live.marks.append((0, self._version, False))
        self._plays.add(play)
        try:
            ends_at = play.begins_at + len(tokens) / self._tokens_per_second
            while self._released_at is not None or ends_at > self._clock():
                self._news.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(None if self._released_at is not None else ends_at - self._clock()):
                        await self._news.wait()
                if self._failure:
                    raise InfrastructureError(f"engine: {self._failure}")
        finally:
            self._plays.remove(play)
        live.tokens, live.logprobs = tokens, scripted_logprobs(tokens)
        return self._generation(live, end)

    async def score(self, request: ScoreRequest) -> Logprobs:
        """A fixed function of each token and its predecessor, in (-3, 0)."""
        if self._failure:
            raise InfrastructureError(f"engine: {self._failure}")
        check_score_request(request, context_length=self.setup.context_length)
        tokens = request.token_ids.astype(np.int64)
        tokens[1:] += 31 * tokens[:-1]
        return scripted_logprobs(tokens)[request.positions]

    async def load(self, update: WeightUpdate) -> None:
        if self._shapes is not None:
            check_update(update, self._shapes)
        self._catch_up()

    async def release(self) -> None:
        """Stop the clock."""
        if self._released_at is None:
            self._released_at = self._clock()

    async def restore(self, update: WeightUpdate) -> None:
        if update.version != self._version:
            await self.update(update)
        if self._released_at is not None:
            self._stood_still_s = time.monotonic() - self._released_at
            self._released_at = None
            self._news.set()

    def health(self) -> EngineHealth:
        self._catch_up()
        return super().health()

    async def stop(self) -> None:
        await super().stop()
        self._news.set()

    def _script_tokens(self, request: GenerationRequest) -> tuple[TokenIds, FinishReason]:
        """The script's tokens up to the first stop token, the budget, or the context."""
        tokens = np.asarray(self._script(request), dtype=np.int32)
        finish_reason = FinishReason.STOP
        stops = np.flatnonzero(np.isin(tokens, request.stop_token_ids))
        stops = stops[stops >= request.sampling.min_new_tokens]
        if len(stops):
            tokens = tokens[: stops[0] + 1]
        room = min(request.sampling.max_new_tokens, self.setup.context_length - len(request.prompt_ids))
        if len(tokens) > room or (len(tokens) == room and not len(stops)):
            tokens, finish_reason = tokens[:room], FinishReason.LENGTH
        return tokens, finish_reason

    def _clock(self) -> float:
        """Seconds on the engine's clock, which stands still while the device is another's."""
        return self._released_at if self._released_at is not None else time.monotonic() - self._stood_still_s

    def _catch_up(self) -> None:
        """Emit the tokens that are due."""
        for play in self._plays:
            due = len(play.tokens)
            if not math.isinf(self._tokens_per_second):
                due = max(0, min(due, int((self._clock() - play.begins_at) * self._tokens_per_second)))
            play.live.tokens = play.tokens[:due]


def scripted_logprobs(tokens: npt.NDArray[np.integer[Any]]) -> Logprobs:
    """A fixed function of token and place, in (-3, 0)."""
    mixed = tokens.astype(np.int64) * 2654435761 + np.arange(len(tokens), dtype=np.int64) * 40503
    return np.asarray(-0.05 - (mixed % 1021) / 1021 * 2.9, dtype=np.float32)
