"""Caches answers; concurrent equal questions share one computation.

A cached answer is used only for the same question, only for a program that is deterministic by its text, and only when
no limit was near and no machinery failed. When the first of equal questions fails, or its answer may not be cached,
each question is answered separately. Subclasses define which questions are the same, which programs are deterministic
and which runs are far from limits: one for judgements, one for runs.

Answers are kept in memory only: they live as long as the process, and so its sandbox, its limits and its interpreter.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from services.common.telemetry.gateway_queue import Lane

Question = TypeVar("Question")
Answer = TypeVar("Answer")

Where = tuple[Hashable, Lane, str]  # a question that is being answered: its key, its lane, its client

_TIME_SHARE, _MEMORY_SHARE = 0.25, 0.5  # of a limit, that a run may have taken


@dataclass(slots=True)
class _Known(Generic[Answer]):
    answer: Answer
    num_bytes: int
    is_deterministic: bool | None = None  # None until a second caller asks


@dataclass(slots=True)
class _Running(Generic[Answer]):
    is_deterministic: bool | None = None
    waiting: list[asyncio.Future[Answer | None]] = field(default_factory=list)


class Memory(ABC, Generic[Question, Answer]):
    """``await memory.run(question, lane, client, find)``: the answer that is known, or that of ``find()``."""

    def __init__(self, most: int, most_bytes: int, counts: Counter[str], counted_as: str = "") -> None:
        """Bounds: number of answers, and their bytes. ``counts`` gets ``remembered`` and ``joined``, with
        ``counted_as`` behind."""
        self._most = most
        self._most_bytes = most_bytes
        self._counts = counts
        self._remembered, self._joined = f"remembered{counted_as}", f"joined{counted_as}"
        self._known: OrderedDict[Hashable, _Known[Answer]] = OrderedDict()
        self._num_bytes = 0
        self._running: dict[Where, _Running[Answer]] = {}

    @abstractmethod
    def _key(self, question: Question) -> Hashable:
        """All inputs of the answer; None for a question that is not cached."""

    @abstractmethod
    def _is_deterministic(self, question: Question) -> bool:
        """Whether each run of the program gives the same output, by its text."""

    @abstractmethod
    def _is_final(self, question: Question, answer: Answer) -> bool:
        """Whether the answer is independent of limits and machinery."""

    @abstractmethod
    def _weight(self, question: Question, answer: Answer) -> int:
        """About the bytes that the answer and its key take."""

    @abstractmethod
    def _answer_to(self, answer: Answer, question: Question) -> Answer:
        """The answer as the one to this question, which may have another id."""

    def __len__(self) -> int:
        return len(self._known)

    @property
    def num_bytes(self) -> int:
        """Approximate size of the answers."""
        return self._num_bytes

    async def run(self, question: Question, lane: Lane, client: str, find: Callable[[], Awaitable[Answer]]) -> Answer:
        """Raises the errors of ``find()``. Cancelling the caller ends no search but its own."""
        key = self._key(question)
        if key is None:
            return await find()
        known = self._known.get(key)
        if known is not None:
            if known.is_deterministic is None:
                known.is_deterministic = self._is_deterministic(question)
            if not known.is_deterministic:
                return await find()
            self._known.move_to_end(key)
            self._counts[self._remembered] += 1
            return self._answer_to(known.answer, question)
        where = (key, lane, client)  # a question that another lane or client waits for may take longer
        running = self._running.get(where)
        if running is None:
            return await self._lead(where, question, find)
        if running.is_deterministic is None:
            running.is_deterministic = self._is_deterministic(question)
        if running.is_deterministic:
            waiting: asyncio.Future[Answer | None] = asyncio.get_running_loop().create_future()
            running.waiting.append(waiting)
            answer = await waiting  # within the deadline of the first, and within the caller's own
            if answer is not None:
                self._counts[self._joined] += 1
                return self._answer_to(answer, question)
        return await find()

    async def _lead(self, where: Where, question: Question, find: Callable[[], Awaitable[Answer]]) -> Answer:
        running = self._running[where] = _Running[Answer]()
        final: Answer | None = None
        try:
            answer = await find()
            if self._is_final(question, answer):
                final = answer
                self._remember(where[0], _Known(answer, self._weight(question, answer), running.is_deterministic))
            return answer
        finally:
            del self._running[where]
            for waiting in running.waiting:
                if not waiting.done():
                    waiting.set_result(final)

    def _remember(self, key: Hashable, known: _Known[Answer]) -> None:
        if (before := self._known.pop(key, None)) is not None:
            self._num_bytes -= before.num_bytes
        self._known[key] = known
        self._num_bytes += known.num_bytes
        while len(self._known) > self._most or self._num_bytes > self._most_bytes:
            _, oldest = self._known.popitem(last=False)
            self._num_bytes -= oldest.num_bytes


def is_within_shares(limits: dict[str, float | int], *, wall_s: float, cpu_s: float, peak_memory_bytes: int) -> bool:
    """Whether a run stayed so far from its limits that they did not affect the result."""
    return (
        wall_s <= _TIME_SHARE * limits["wall_s"]
        and cpu_s <= _TIME_SHARE * limits["cpu_s"]
        and peak_memory_bytes <= _MEMORY_SHARE * limits["memory_bytes"]
    )
