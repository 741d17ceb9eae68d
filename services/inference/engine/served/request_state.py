"""State of one request: its tokens so far by weight version, and its remaining budget.

A request takes one or more server calls. Several are needed when a server dies, when the server stops at an end-of-text
token that is no stop token of the request, and when stop tokens are forbidden for the first tokens (by a bias, which lasts
for a call). All calls share the request's budget.

A call that ended is judged here: the tokens to keep of a broken call, and whether the request needs another call.
"""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass, field

from services.common.errors import InfrastructureError, InvalidRequestError
from services.common.records.kept_tokens import KeptRow, pack
from services.common.records.types import Segment
from services.inference.engine.base import FinishReason, Generation, GenerationRequest
from services.inference.engine.served.client import CallRequest, Finish, VersionSpan
from services.inference.engine.served.server import Server


@dataclass(frozen=True, slots=True)
class _Part:
    """Tokens of one version, up to ``end``."""

    end: int
    version: int
    mixed: bool


@dataclass(slots=True, eq=False)
class RequestState:
    """The state of one request. ``room``: the tokens that the context has left after the prompt."""

    request: GenerationRequest
    room: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept: list[KeptRow] = field(default_factory=list)  # of the first tokens only
    aborted: bool = False
    abort_requested: asyncio.Event = field(default_factory=asyncio.Event)
    _parts: list[_Part] = field(default_factory=list)

    @property
    def remaining(self) -> int:
        """Tokens that may still come."""
        return min(self.request.sampling.max_new_tokens, self.room) - len(self.tokens)

    @property
    def sequence(self) -> tuple[int, ...]:
        """The prompt and the tokens so far."""
        return (*self.request.prompt_ids, *self.tokens)

    def abort(self) -> None:
        self.aborted = True
        self.abort_requested.set()

    def ended(self) -> FinishReason | None:
        """The reason if the request is complete, else None."""
        if self.aborted:
            return FinishReason.ABORTED
        if self.tokens and self.tokens[-1] in self.request.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.remaining <= 0 else None

    def next_call(self, chunk_tokens: int, adapter: str = "") -> CallRequest:
        """The next call of a server, with the adapter of this name. No id is a prefix of another: SGLang aborts all requests whose ids have the prefix."""
        num_suppressed = self.request.sampling.min_new_tokens - len(self.tokens)
        suppress = num_suppressed > 0 and bool(self.request.stop_token_ids)
        return CallRequest(
            rid=uuid.uuid4().hex,
            input_ids=self.sequence,
            max_new_tokens=min(self.remaining, num_suppressed) if suppress else self.remaining,
            sampling=self.request.sampling,
            stop_token_ids=self.request.stop_token_ids,
            suppress_stop=suppress,
            chunk_tokens=1 if self.request.watch is not None else chunk_tokens,
            adapter=adapter,
        )

    def take(self, output: CallOutput, spans: tuple[VersionSpan, ...], *, mixed_from: int | None) -> None:
        """Add a call's tokens. ``mixed_from``: the first span that was computed on an older version's cache.

        Raises ``InfrastructureError`` if the spans do not name the version of each token.
        """
        start = 0
        offset = len(self.tokens)
        num_tokens = len(output.tokens)
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
            raise InfrastructureError(f"the server does not say which weights computed {num_tokens} tokens: {spans}")
        self.tokens += output.tokens
        self.logprobs += output.logprobs
        self.kept += output.kept
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
class CallOutput:
    """The tokens so far of one server call."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept: list[KeptRow] = field(default_factory=list)  # empty where the sampling is not cut
    cut: int | None = None  # tokens after which ``watch`` has ended the call
    abort_sent: bool = False  # whether the server has an abort

    def cut_off(self) -> None:
        """Drop the tokens after the cut."""
        if self.cut is not None:
            self.keep_first(self.cut)

    def keep_first(self, num_tokens: int) -> None:
        """Drop the tokens after the first ``num_tokens``."""
        for column in (self.tokens, self.logprobs, self.kept):
            del column[num_tokens:]


class Interrupted(Exception):
    """A server call that broke without a fault of the request."""


class NotFinite(InfrastructureError):
    """A failure that a retry under the same weights would repeat."""


class CertainTokens:
    """The tokens to keep of a broken call, whose server did not report the versions of the tokens.

    All tokens that came before the server's next switch were computed with its settled version.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._switches = server.switches
        # A call with an adapter has its version to the end.
        self._is_fixed = bool(server.adapter)
        self._version = server.version if self._is_fixed else server.settled_version
        self._certain: int | None = None if self._version is not None else 0

    @property
    def of_adapter(self) -> int | None:
        """The version of all tokens of a call with an adapter; None for another call."""
        return self._version if self._is_fixed else None

    @property
    def is_outdated(self) -> bool:
        """Whether the server has switched since the call's begin."""
        return self._server.switches != self._switches

    def note(self, num_tokens: int) -> None:
        """Note the number of tokens before the current chunk."""
        if self._certain is None and not self._is_fixed and self.is_outdated:
            self._certain = num_tokens

    def take(self, output: CallOutput, state: RequestState, *, mixed: bool) -> None:
        """Keep these tokens. ``InfrastructureError`` if a watch has seen tokens beyond them."""
        output.cut_off()
        if self._certain is not None:
            if output.cut is not None and self._certain < output.cut:
                raise InfrastructureError(
                    "the server did not report the weight version of tokens that were already watched"
                )
            output.keep_first(self._certain)
        if output.tokens:
            assert self._version is not None
            span = VersionSpan(version=self._version, start=0, end=len(output.tokens))
            state.take(output, (span,), mixed_from=0 if mixed else None)


def judge(finish: Finish, output: CallOutput, state: RequestState) -> None:
    """Judge a completed call: returns if the tokens count, else raises ``Interrupted`` (another call is needed) or an error."""
    if finish.kind == "abort":
        if finish.status is not None and 400 <= finish.status < 500:
            raise InvalidRequestError(
                f"request {state.request.request_id!r}: the server refuses the request: {finish.message}"
            )
        raise Interrupted(finish.message or "the server ended the call")
    if not output.tokens:
        raise InfrastructureError(
            f"request {state.request.request_id!r}: no room for another token after {len(state.sequence)}: the KV cache "
            "of the server is smaller than policies.<name>.model.context_length; give the server more memory"
        )
