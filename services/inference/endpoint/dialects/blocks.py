"""Writes an answer as blocks, one after the other: the thought, the text, the calls of tools.

The base of dialects that have thoughts and calls apart from the text. Text is sent as it grows; a block is begun with its
first character and ended before the next begins.
"""

from __future__ import annotations

import enum
from abc import abstractmethod
from collections.abc import Iterable, Iterator

from services.common.text.chat import Chat
from services.common.text.thoughts import END_OF_THOUGHT, THOUGHT
from services.inference.endpoint.dialects.base import AnswerWriter, DialectRequest
from services.inference.workflows.agents.chat_messages import Answer, Call
from services.inference.workflows.agents.stop_text import settled
from services.inference.workflows.agents.turns import CapturedTurn


class Kind(enum.Enum):
    THOUGHT = enum.auto()
    TEXT = enum.auto()


def texts_of(answer: Answer) -> Iterator[tuple[Kind, str]]:
    """The blocks of an answer before its calls. An answer of nothing is one empty text, which clients can return."""
    if answer.thought:
        yield Kind.THOUGHT, answer.thought
    if answer.said or not (answer.thought or answer.calls):
        yield Kind.TEXT, answer.said


def split_growing(text: str, *, thinks: bool) -> tuple[str, str]:
    """Thought and text of an answer that still grows, without what may turn out to be a tag or space at an end.

    >>> split_growing("<thi", thinks=False), split_growing("<think>a b </th", thinks=False)
    (('', ''), ('a b', ''))
    """
    begun = text.lstrip()
    if not thinks and THOUGHT.startswith(begun[: len(THOUGHT)]) and len(begun) < len(THOUGHT):
        return "", ""
    if not thinks and not begun.startswith(THOUGHT):
        return "", text.strip()
    if thinks and THOUGHT.startswith(begun) and len(begun) < len(THOUGHT):
        return "", ""  # a template that opens the thought, and a policy that opens it again
    thought, ended, said = begun.removeprefix(THOUGHT).partition(END_OF_THOUGHT)
    return (thought if ended else settled(thought, [END_OF_THOUGHT])).strip(), said.strip()


class BlockWriter(AnswerWriter):
    def __init__(self, request: DialectRequest, policy: str, chat: Chat, *, thinks: bool) -> None:
        super().__init__(request, policy, chat, thinks=thinks)
        self.num_blocks = 0
        self._open: Kind | None = None
        self._sent = {Kind.THOUGHT: "", Kind.TEXT: ""}

    def text(self, settled: str) -> Iterable[bytes]:
        thought, said = split_growing(settled, thinks=self.thinks)
        yield from self._grow(Kind.THOUGHT, thought)
        yield from self._grow(Kind.TEXT, said)

    def finish(self, turn: CapturedTurn) -> Iterable[bytes]:
        for kind, text in texts_of(turn.answer):
            if not text and not self.num_blocks:
                yield from self._begin_block(kind)
            yield from self._grow(kind, text)
        yield from self._end_block()
        for call in turn.answer.calls:
            yield from self.write_call(call)
            self.num_blocks += 1
        yield from self.end(turn)

    def _grow(self, kind: Kind, text: str) -> Iterable[bytes]:
        sent = self._sent[kind]
        if len(text) <= len(sent) or not text.startswith(sent):
            return
        if self._open is not kind:
            yield from self._end_block()
            yield from self._begin_block(kind)
        self._sent[kind] = text
        yield from self.write_delta(kind, text[len(sent) :])

    def _begin_block(self, kind: Kind) -> Iterable[bytes]:
        self._open = kind
        yield from self.begin_block(kind)

    def _end_block(self) -> Iterable[bytes]:
        if self._open is not None:
            yield from self.end_block(self._open, self._sent[self._open])
            self._open = None
            self.num_blocks += 1

    # -- of a dialect; ``num_blocks`` is the number of the block --------------------------------------------------

    @abstractmethod
    def begin_block(self, kind: Kind) -> Iterable[bytes]: ...

    @abstractmethod
    def write_delta(self, kind: Kind, text: str) -> Iterable[bytes]: ...

    @abstractmethod
    def end_block(self, kind: Kind, text: str) -> Iterable[bytes]: ...

    @abstractmethod
    def write_call(self, call: Call) -> Iterable[bytes]: ...

    @abstractmethod
    def end(self, turn: CapturedTurn) -> Iterable[bytes]: ...
