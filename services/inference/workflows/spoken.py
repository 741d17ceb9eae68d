"""What is watched while a policy speaks: text as it grows, and where a stop text ends the turn.

Tokens are told by the engine's thread, one by one; an engine that tells none has its finished generation looked at
instead, with the same outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from services.common.chat import Chat
from services.common.types import Segment
from services.inference.engine.base import FinishReason, Generation

_BYTES_PER_CHARACTER = 4  # of UTF-8 at most, and a token is one byte at least
_BROKEN = "\N{REPLACEMENT CHARACTER}"  # a character whose last bytes have not come yet


class StopWatch:
    """``told`` is an engine's watch: True when the token completes one of ``stops``. ``on_token`` hears every token."""

    def __init__(self, chat: Chat, stops: Sequence[str], on_token: Callable[[int], None] | None = None) -> None:
        self._chat = chat
        self._stops = tuple(stops)
        self._window = max((_BYTES_PER_CHARACTER * len(stop) for stop in stops), default=0) + 1
        self._on_token = on_token
        self._heard: list[int] = []
        self._stopped_at: int | None = None  # tokens up to and with the one that completed a stop

    def told(self, token: int) -> bool:
        if self._stopped_at is not None:
            return True
        self._heard.append(token)
        if self._on_token is not None:
            self._on_token(token)
        if self._stops:
            tail = self._chat.decode(self._heard[-self._window :])
            if any(stop in tail for stop in self._stops):
                self._stopped_at = len(self._heard)
        return self._stopped_at is not None

    def finish(self, generation: Generation) -> Generation:
        """Hear what the engine did not tell, and cut the generation behind the token that completed a stop.

        The tokens that are kept were drawn as if nothing had come after them, so their log-probabilities stand.
        """
        if not self._stops and self._on_token is None:
            return generation
        for token in generation.token_ids[len(self._heard) :]:
            if self.told(token):
                break
        if self._stopped_at is None:
            return generation
        return Generation(
            segments=_first_tokens(generation.segments, self._stopped_at), finish_reason=FinishReason.STOP
        )

    def visible(self, text: str) -> str:
        """The text before the first stop."""
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        return text[: min(found)] if found else text


class GrowingText:
    """Text of a growing list of tokens, whose cost per token does not grow with it."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._ids: list[int] = []
        self._begin = 0  # the piece that is decoded again; a decoder may look at what stands before
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
    """The text without an end that may be the beginning of one of ``endings``, and nothing from one on.

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
