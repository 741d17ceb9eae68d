"""The ``Engine`` protocol: token ids in; token ids, behaviour log-probabilities and weight versions out.

An engine serves one policy. The protocol is independent of text, workflows, gRPC and the source of weights.

Weight updates never drop running generations: ``update`` takes effect between two decoding steps, tokens
keep the version that computed them, and by default the KV cache of live requests is recomputed, so that every
log-probability equals a plain forward pass of the version named on its segment.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from services.common.errors import ConfigError
from services.common.records.types import Logprobs, Sampling, Segment, TokenIds
from services.inference.engine.weight_update import WeightUpdate

Watch = Callable[[int], bool]  # called with each sampled token; True ends the generation with that token


class FinishReason(enum.StrEnum):
    STOP = "stop"  # a stop token was sampled: the last token of the result
    LENGTH = "length"  # the end of max_new_tokens, the context, or forced_ids
    ABORTED = "aborted"


class KvPolicy(enum.StrEnum):
    """Treatment of the KV cache of live requests when the weights change."""

    RECOMPUTE = "recompute"  # exact: later tokens equal a forward pass of the new weights
    KEEP = "keep"  # cheaper: later segments are marked ``mixed_cache``


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """``sampling.max_new_tokens`` is the budget over interruptions and weight swaps alike."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    stop_token_ids: tuple[int, ...]
    seed: int | None = None
    forced_ids: tuple[int, ...] | None = None
    """Tokens to emit instead of sampled ones, one per decoding step. Required by the replay engine; others refuse them."""
    record_kept: bool = True
    """Whether segments list the drawable tokens if the sampling is truncated. Off in evaluation."""
    watch: Watch | None = field(default=None, compare=False)
    """Called in the engine's thread, so the call must be quick. An engine may never call ``watch``: the caller then checks
    the finished generation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The sampled tokens. ``segments`` are policy segments, one per run of tokens of one weight version."""

    segments: tuple[Segment, ...]
    finish_reason: FinishReason

    @property
    def token_ids(self) -> list[int]:
        return [int(t) for s in self.segments for t in s.token_ids]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """Tokens to score that this engine did not sample: those at ``positions``, each given all tokens before."""

    request_id: str
    token_ids: TokenIds  # [num_tokens] of the whole sequence
    positions: npt.NDArray[np.int64]  # [num_scored], ascending, from 1 on: no token precedes the first
    temperatures: npt.NDArray[np.float32]  # [num_scored] that they were drawn at, above 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KvUse:
    """A paged KV cache: blocks now, and two counts since start."""

    blocks: int  # that requests can hold
    used: int  # by running requests and by cached prefixes
    shared: int  # used by several sequences at once
    evicted: int  # cached prefixes that were given up for their memory
    parked: int  # running requests that gave up their cache for memory, and computed it again later


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHealth:
    ok: bool
    detail: str
    running: int  # requests in slots
    waiting: int  # requests queued
    free_slots: int
    generated_tokens: int  # since start
    kv: KvUse | None = None  # None where the cache is not paged, or is the business of another process


class Engine(Protocol):
    """Raises ``PromptTooLongError`` when a prompt does not fit, ``InfrastructureError`` when the engine died."""

    async def start(self) -> None: ...

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample one continuation. Cancelling the awaiting task aborts the request."""
        ...

    async def score(self, request: ScoreRequest) -> Logprobs:
        """Log-probabilities [num_scored] of given tokens over the whole vocabulary, each at its temperature, under the weights
        held now. ``ConfigError`` where the engine cannot; cancelling the awaiting task withdraws the request."""
        ...

    async def abort(self, request_id: str) -> None:
        """End a request; its ``generate`` returns the tokens so far with ``FinishReason.ABORTED``."""
        ...

    async def pause(self) -> None:
        """Return when no decoding step is running; requests stay where they are."""
        ...

    async def resume(self) -> None: ...

    async def update(self, update: WeightUpdate) -> float:
        """Switch to another version in place; returns the seconds without decoding.

        Atomic between two decoding steps: no token is ever computed from a mixture. ``ModelMismatchError`` for a
        missing name or another shape, before anything changes. The caller may change the update's arrays after the return.
        """
        ...

    async def flush(self) -> None:
        """Forget every cached prefix."""
        ...

    @property
    def version(self) -> int: ...

    def health(self) -> EngineHealth: ...

    async def stop(self) -> None: ...


@runtime_checkable
class SharesDevice(Protocol):
    """An engine that frees its memory while another process needs the device."""

    async def release(self) -> None:
        """Stop between two decoding steps, and free the memory of weights and caches. Requests stay where they are, and new
        ones wait; ``update`` only changes the version, under which ``restore`` goes on. Harmless when released already."""
        ...

    async def restore(self, update: WeightUpdate) -> None:
        """Take the memory again, with the weights of a complete update, and go on: the caches of running requests are computed
        again. Raises like ``update``."""
        ...


def sharing(engine: Engine) -> SharesDevice:
    """The engine as one that frees its memory. Raises ``ConfigError`` for one that does not."""
    if isinstance(engine, SharesDevice):
        return engine
    raise ConfigError(
        f"engine {type(engine).__name__} does not free its memory between turns: write placement: apart, or engine: torch"
    )
