"""Types of one server call: its request, its tokens, its end.

Independent of HTTP and a program's names; ``client`` converts these types to and from HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from services.common.records.kept_tokens import KeptRow, kept_rows
from services.common.records.types import Sampling


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
    """The reason of a call's end. ``matched`` is the stop token; ``message`` and ``status`` are an abortion's."""

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
    kept: list[KeptRow]  # the drawable tokens if the sampling is truncated; else empty
    cached_tokens: int  # of the call's input, taken from the server's cache
    finish: Finish | None


def rows_of_masks(masks: Sequence[Sequence[int]], token_ids: Sequence[int]) -> list[KeptRow]:
    """The drawable tokens at each position, of lists of their ids."""
    if not masks:
        return []
    counts = np.array([len(mask) for mask in masks], dtype=np.int64)
    ids = np.zeros((len(masks), int(counts.max())), dtype=np.int64)
    ids[np.arange(ids.shape[1]) < counts[:, None]] = [token for mask in masks for token in mask]
    return kept_rows(ids, counts, np.array(token_ids, dtype=np.int64))
