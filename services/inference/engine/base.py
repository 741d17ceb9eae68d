"""The ``Engine`` protocol: token ids in; token ids, behaviour log-probabilities and weight versions out.

An engine serves one policy. It knows nothing about text, workflows, gRPC or where weights come from.

Weight updates never drop what is being generated: ``update`` takes effect between two decoding steps, tokens
keep the version that computed them, and by default the KV cache of live requests is recomputed, so that every
log-probability equals a plain forward pass of the version named on its segment.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from services.common.types import Logprobs, Sampling, Segment, TokenIds
from services.inference.engine.weight_update import WeightUpdate

Watch = Callable[[int], bool]  # is told each token as it is sampled; True ends the generation with that token


class FinishReason(enum.StrEnum):
    STOP = "stop"  # a stop token was sampled (it is the last token of the result)
    LENGTH = "length"  # max_new_tokens, the context, or what was to be said ran out
    ABORTED = "aborted"


class KvPolicy(enum.StrEnum):
    """What happens to the KV cache of live requests when the weights change."""

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
    """What to say instead of sampling, one token per decoding step. The forced engine asks for it, others refuse it."""
    record_kept: bool = True
    """Whether segments say which tokens could be drawn, where the sampling is truncated. Evaluation does without."""
    watch: Watch | None = field(default=None, compare=False)
    """Called in the engine's thread, so it must be quick. An engine that cannot call it leaves it out: whoever watches
    looks at the finished generation for what it was not told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What was sampled. ``segments`` are policy segments, one per run of tokens of one weight version."""

    segments: tuple[Segment, ...]
    finish_reason: FinishReason

    @property
    def token_ids(self) -> list[int]:
        return [int(t) for s in self.segments for t in s.token_ids]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """What tokens that somebody else sampled are to be scored: those at ``positions``, given all before them."""

    request_id: str
    token_ids: TokenIds  # [num_tokens] of the whole sequence
    positions: npt.NDArray[np.int64]  # [num_scored], ascending, from 1 on: no token precedes the first
    temperatures: npt.NDArray[np.float32]  # [num_scored] that they were drawn at, above 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHealth:
    ok: bool
    detail: str
    running: int  # requests in slots
    waiting: int  # requests queued
    free_slots: int
    generated_tokens: int  # since start


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
        """End a request; its ``generate`` returns what it has with ``FinishReason.ABORTED``."""
        ...

    async def pause(self) -> None:
        """Return when no decoding step is running; requests stay where they are."""
        ...

    async def resume(self) -> None: ...

    async def update(self, update: WeightUpdate) -> float:
        """Take another version, in place; returns seconds that decoding stood still.

        Atomic between two decoding steps: no token is ever computed from a mixture. ``ModelMismatchError`` for a
        missing name or another shape, before anything changes. The arrays of the update may change once it returned.
        """
        ...

    async def flush(self) -> None:
        """Forget every cached prefix."""
        ...

    @property
    def version(self) -> int: ...

    def health(self) -> EngineHealth: ...

    async def stop(self) -> None: ...
