"""Bounded cache of costly values: concurrent requests for one key share one computation. Safe for many threads."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar

from services.common.errors import DeadlineError, InfrastructureError


class Sized(Protocol):
    @property
    def size_bytes(self) -> int: ...


Value = TypeVar("Value", bound=Sized)


class SingleFlightCache(Generic[Value]):
    """Keeps at most ``max_bytes``, but always the newest value; the least recently used value goes first."""

    def __init__(self, max_bytes: int = 0, *, num_threads: int = 4) -> None:
        """``num_threads`` values are made at a time."""
        self.max_bytes = max_bytes
        self._threads = ThreadPoolExecutor(num_threads, "publisher.single_flight")
        self._kept: OrderedDict[Hashable, Value] = OrderedDict()
        self._pending: dict[Hashable, Future[Value]] = {}
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], Value], wait: str, timeout_s: float) -> Value:
        """The value of ``key``. ``make`` runs in a thread of the cache; callers with other keys do not wait.

        Raises:
            DeadlineError: making the value takes longer than ``timeout_s``; ``wait`` names the value. The value is
                still made, for a later caller.
            InfrastructureError: the cache is closed.
            Every error of ``make``, in each caller that waits; the next caller tries again.
        """
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
            future = self._pending.get(key)
            if future is None:
                try:
                    future = self._threads.submit(self._make, key, make)
                except RuntimeError as error:  # closed
                    raise InfrastructureError(f"{wait} is not made any more") from error
                self._pending[key] = future
        try:
            return future.result(timeout_s)
        except CancelledError as error:
            raise InfrastructureError(f"{wait} is not made any more") from error
        except TimeoutError:
            if future.done():
                raise  # ``make`` itself raised TimeoutError
            raise DeadlineError(f"{wait} took longer than {timeout_s:g} s", wait=wait) from None

    def close(self) -> None:
        """Cancel the values that are not begun, and wait for the others."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def __contains__(self, key: Hashable) -> bool:
        """Whether the value is kept or in progress."""
        with self._lock:
            return key in self._kept or key in self._pending

    def __iter__(self) -> Iterator[Value]:
        """The values that are kept now."""
        with self._lock:
            return iter(list(self._kept.values()))

    @property
    def size_bytes(self) -> int:
        return sum(value.size_bytes for value in self)

    def _make(self, key: Hashable, make: Callable[[], Value]) -> Value:
        try:
            value = make()
        except BaseException:
            with self._lock:
                del self._pending[key]
            raise
        with self._lock:
            del self._pending[key]
            self._kept[key] = value
            self._drop()
        return value

    def _drop(self) -> None:
        size = sum(value.size_bytes for value in self._kept.values())
        while size > self.max_bytes and len(self._kept) > 1:
            _, dropped = self._kept.popitem(last=False)
            size -= dropped.size_bytes
