"""The words for one call of a server: what a leg asks for, the tokens that it brings, how it ended.

Knows neither HTTP nor SGLang's names; ``client`` turns these into requests and answers into these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from services.common.kept_tokens import KeptRow
from services.common.types import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class LegRequest:
    """One call of a server for one request: a continuation of ``input_ids``."""

    rid: str
    input_ids: Sequence[int]
    max_new_tokens: int
    sampling: Sampling  # of which temperature, top_p, top_k and min_p are meant
    stop_token_ids: Sequence[int]
    suppress_stop: bool  # none of the stop tokens can be drawn
    chunk_tokens: int  # tokens that come together


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Tokens ``start`` to ``end`` of the leg were computed with this version of the weights."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """Why a leg ended. ``matched`` is the stop token; ``message`` and ``status`` are an abortion's."""

    kind: Literal["stop", "length", "abort"]
    spans: tuple[VersionSpan, ...]
    matched: int | None = None
    message: str = ""
    status: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Tokens that have come since the last chunk, with their log-probabilities."""

    token_ids: list[int]
    logprobs: list[float]  # NaN where the server had none
    kept: list[KeptRow]  # which tokens could be drawn, where the sampling is truncated; else empty
    cached_tokens: int  # of the leg's input, taken from the server's cache
    finish: Finish | None
