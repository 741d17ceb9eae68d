"""A bounded store of things that take long to make: each is made once, whoever asks first, and the others wait.

Knows nothing about what is made. Used from many threads.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from typing import Generic, Protocol, TypeVar

from services.common.errors import DeadlineError


class Sized(Protocol):
    @property
    def size_bytes(self) -> int: ...


Thing = TypeVar("Thing", bound=Sized)


class MadeOnce(Generic[Thing]):
    """Keeps at most ``max_bytes``, and always the newest thing; the longest unused goes first."""

    def __init__(self, max_bytes: int = 0) -> None:
        self.max_bytes = max_bytes
        self._kept: OrderedDict[Hashable, Thing] = OrderedDict()
        self._pending: dict[Hashable, Future[Thing]] = {}
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], Thing], wait: str, timeout_s: float) -> Thing:
        """The thing of that key; ``make`` runs in the thread of who asks first, and nobody else is held up.

        Raises:
            DeadlineError: another thread is making it and took longer than ``timeout_s``; ``wait`` names it.
            Whatever ``make`` raises, to everybody who waits for it; the next to ask tries again.
        """
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
            future = self._pending.get(key)
            if future is None:
                making: Future[Thing] = Future()
                self._pending[key] = making
        if future is not None:
            try:
                return future.result(timeout_s)
            except TimeoutError:
                if future.done():
                    raise  # its own word
                raise DeadlineError(f"{wait} took longer than {timeout_s:g} s", wait=wait) from None
        try:
            thing = make()
        except BaseException as error:
            with self._lock:
                del self._pending[key]
            making.set_exception(error)
            raise
        with self._lock:
            del self._pending[key]
            self._kept[key] = thing
            self._drop()
        making.set_result(thing)
        return thing

    def __iter__(self) -> Iterator[Thing]:
        """What is kept at this moment."""
        with self._lock:
            return iter(list(self._kept.values()))

    @property
    def size_bytes(self) -> int:
        return sum(thing.size_bytes for thing in self)

    def _drop(self) -> None:
        size = sum(thing.size_bytes for thing in self._kept.values())
        while size > self.max_bytes and len(self._kept) > 1:
            _, dropped = self._kept.popitem(last=False)
            size -= dropped.size_bytes
