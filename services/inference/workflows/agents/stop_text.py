"""Detects stop texts while a policy generates, and decodes the growing text.

The engine's thread reports tokens one by one; for an engine that reports none, the finished generation is checked instead,
with the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from services.common.records.types import Segment
from services.common.text.chat import Chat
from services.inference.engine.base import FinishReason, Generation

_BYTES_PER_CHARACTER = 4  # of UTF-8 at most, and a token is one byte at least
_BROKEN = "\N{REPLACEMENT CHARACTER}"  # a character whose last bytes have not come yet


class StopWatch:
    """``on_sampled`` is an engine's watch: True when the token completes one of ``stops``. ``on_token`` gets every token."""

    def __init__(self, chat: Chat, stops: Sequence[str], on_token: Callable[[int], None] | None = None) -> None:
        self._chat = chat
        self._stops = tuple(stops)
        self._window = max((_BYTES_PER_CHARACTER * len(stop) for stop in stops), default=0) + 1
        self._on_token = on_token
        self._seen: list[int] = []
        self._stopped_at: int | None = None  # tokens up to and with the one that completed a stop

    def on_sampled(self, token: int) -> bool:
        if self._stopped_at is not None:
            return True
        self._seen.append(token)
        if self._on_token is not None:
            self._on_token(token)
        if self._stops:
            tail = self._chat.decode(self._seen[-self._window :])
            if any(stop in tail for stop in self._stops):
                self._stopped_at = len(self._seen)
        return self._stopped_at is not None

    def finish(self, generation: Generation) -> Generation:
        """Process the tokens that the engine did not report; cut the generation behind the token that completed a stop.

        The kept tokens were drawn independently of the later ones, so their log-probabilities stay valid.
        """
        if not self._stops and self._on_token is None:
            return generation
        for token in generation.token_ids[len(self._seen) :]:
            if self.on_sampled(token):
                break
        if self._stopped_at is None:
            return generation
        return Generation(
            segments=_first_tokens(generation.segments, self._stopped_at), finish_reason=FinishReason.STOP
        )

    def stop_in(self, text: str) -> str | None:
        """The first stop in a text."""
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        return min(found)[1] if found else None


class IncrementalText:
    """Decodes a growing list of tokens; the cost per token does not grow with the length."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._ids: list[int] = []
        self._begin = 0  # the piece that is decoded again; a decoder may need the tokens before
        self._read = 0
        self.text = ""

    def add(self, token: int) -> None:
        self._ids.append(token)
        before = self._chat.decode(self._ids[self._begin : self._read])
        now = self._chat.decode(self._ids[self._begin :])
        if len(now) > len(before) and not now.endswith(_BROKEN):
            self.text += now[len(before) :]
            self._begin, self._read = self._read, len(self._ids)


def settled(text: str, endings: Sequence[str]) -> str:
    """The text before the first of ``endings``, without a tail that may be the beginning of an ending.

    >>> settled("I say <tool", ["<tool_call>"]), settled("a<tool_call>b", ["<tool_call>"])
    ('I say ', 'a')
    """
    for ending in endings:
        text = text.partition(ending)[0]
    held = max(
        (size for ending in endings for size in range(1, len(ending)) if text.endswith(ending[:size])), default=0
    )
    return text[: len(text) - held]


def _first_tokens(segments: Sequence[Segment], num_tokens: int) -> tuple[Segment, ...]:
    kept: list[Segment] = []
    for segment in segments:
        size = min(segment.num_tokens, num_tokens)
        if not size:
            break
        num_tokens -= size
        kept.append(segment.head(size))
    return tuple(kept)
