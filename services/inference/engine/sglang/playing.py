"""One request while it is played: what it has, what it still may take, and what came under which version.

A request is played in legs, one call of a server each. Several are needed when a server dies under it, when the server
stops at an end-of-text token that the request does not stop at, and when stop tokens are forbidden for its first tokens
(the forbidding is a bias, which lasts for a leg). Its budget is one, whatever the legs.
"""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass, field

from services.common.errors import InfrastructureError
from services.common.kept_tokens import KeptRow, pack
from services.common.types import Segment
from services.inference.engine.base import FinishReason, Generation, GenerationRequest
from services.inference.engine.sglang.legs import LegRequest, VersionSpan


@dataclass(frozen=True, slots=True)
class _Part:
    """Tokens of one version, up to ``end``."""

    end: int
    version: int
    mixed: bool


@dataclass(slots=True, eq=False)
class Playing:
    """``room`` is what the context has left after the prompt."""

    request: GenerationRequest
    room: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept: list[KeptRow] = field(default_factory=list)  # of the first tokens: what is cut later, is cut at first
    aborted: bool = False
    told_to_end: asyncio.Event = field(default_factory=asyncio.Event)
    _parts: list[_Part] = field(default_factory=list)

    @property
    def remaining(self) -> int:
        """Tokens that may still come."""
        return min(self.request.sampling.max_new_tokens, self.room) - len(self.tokens)

    @property
    def sequence(self) -> tuple[int, ...]:
        """Prompt and what has come."""
        return (*self.request.prompt_ids, *self.tokens)

    def abort(self) -> None:
        self.aborted = True
        self.told_to_end.set()

    def ended(self) -> FinishReason | None:
        """Why nothing more may come, if so."""
        if self.aborted:
            return FinishReason.ABORTED
        if self.tokens and self.tokens[-1] in self.request.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.remaining <= 0 else None

    def next_leg(self, chunk_tokens: int) -> LegRequest:
        """What to ask a server for now. The id is unlike any other: SGLang aborts all whose ids begin alike."""
        num_suppressed = self.request.sampling.min_new_tokens - len(self.tokens)
        suppress = num_suppressed > 0 and bool(self.request.stop_token_ids)
        return LegRequest(
            rid=uuid.uuid4().hex,
            input_ids=self.sequence,
            max_new_tokens=min(self.remaining, num_suppressed) if suppress else self.remaining,
            sampling=self.request.sampling,
            stop_token_ids=self.request.stop_token_ids,
            suppress_stop=suppress,
            chunk_tokens=1 if self.request.watch is not None else chunk_tokens,
        )

    def take(self, leg: Leg, spans: tuple[VersionSpan, ...], *, mixed_from: int | None) -> None:
        """Add a leg's tokens. ``mixed_from``: its first span that was computed on an older version's cache.

        ``InfrastructureError`` when the spans do not say for each token which version computed it.
        """
        start = 0
        offset = len(self.tokens)
        num_tokens = len(leg.tokens)
        parts = []
        for number, span in enumerate(spans):
            end = min(span.end, num_tokens)
            if span.start != start or span.end < span.start:
                break
            if end > start:
                mixed = mixed_from is not None and number >= mixed_from
                parts.append(_Part(offset + end, span.version, mixed))
            start = span.end
        if start < num_tokens:
            raise InfrastructureError(f"SGLang does not say which weights computed {num_tokens} tokens: {spans}")
        self.tokens += leg.tokens
        self.logprobs += leg.logprobs
        self.kept += leg.kept
        self._parts += parts

    def generation(self, reason: FinishReason) -> Generation:
        return Generation(segments=self._segments(), finish_reason=reason)

    def _segments(self) -> tuple[Segment, ...]:
        segments = []
        start = 0
        for number, part in enumerate(self._parts):
            following = self._parts[number + 1] if number + 1 < len(self._parts) else None
            if following is not None and (following.version, following.mixed) == (part.version, part.mixed):
                continue
            of = slice(start, part.end)
            kept = pack(self.kept[of], part.end - start) if self.request.record_kept else b""
            segments.append(Segment.policy(self.tokens[of], self.logprobs[of], part.version, part.mixed, kept))
            start = part.end
        return tuple(segments)


@dataclass(slots=True)
class Leg:
    """What has come of one leg."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept: list[KeptRow] = field(default_factory=list)  # empty where the sampling is not cut
    cut: int | None = None  # tokens after which somebody who watches has ended it
    told: bool = False  # the server, that it is to end

    def cut_off(self) -> None:
        """Drop what came after its end."""
        if self.cut is not None:
            self.keep_first(self.cut)

    def keep_first(self, num_tokens: int) -> None:
        """Drop what came after so many tokens."""
        for column in (self.tokens, self.logprobs, self.kept):
            del column[num_tokens:]
