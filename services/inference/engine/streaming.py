"""Base class of engines that a recipe names by import path: a subclass yields tokens, one request at a time.

    class Engine(rollmill.Engine):
        async def tokens(self, request):                 # (token id, log-probability), one after the other
            ...
        async def load(self, update):                    # newer weights
            ...

The base class does the rest of the ``Engine`` protocol: slots, budgets, stop tokens, abort, pause, and the weight version of
each token. A step is the time between two tokens of one request; ``load`` runs while no request is in a step.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch

from services.common.aio import deadline
from services.common.errors import ConfigError, InfrastructureError, InvalidRequestError, RollmillError
from services.common.importing import check_call, check_methods, place_of, told
from services.common.records import Logprobs, Segment
from services.common.weights.codec import ChunkChange
from services.common.weights.snapshot import Bits, element_type
from services.inference.engine.base import (
    EngineHealth,
    FinishReason,
    Generation,
    GenerationRequest,
    ScoreRequest,
    WeightUpdate,
    check_request,
    check_update,
)

PAUSE_S = 60.0  # until every request has taken its step
ENGINE_METHODS = {
    "start": "async def start(self)",
    "generate": "async def generate(self, request) -> Generation",
    "abort": "async def abort(self, request_id)",
    "pause": "async def pause(self)",
    "resume": "async def resume(self)",
    "update": "async def update(self, update) -> float",
    "flush": "async def flush(self)",
    "score": "async def score(self, request) -> Logprobs",
    "health": "def health(self) -> EngineHealth",
    "stop": "async def stop(self)",
}
"""The members that the class of ``inference.<name>.engine`` must have; ``StreamingEngine`` has all of them."""
TOKENS = {"tokens": "async def tokens(self, request)"}  # with ``yield``; of a subclass of ``StreamingEngine``


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """The arguments of an engine's constructor."""

    policy: str
    context_length: int  # tokens of prompt and response together
    num_slots: int  # requests generated at once
    device: str = "auto"
    dtype: str = "float32"
    model_path: str = ""  # directory or hub name of the starting checkpoint; empty for an engine without weights
    weights: Mapping[str, Any] = field(default_factory=dict)  # tensors of version 0 on the host, by Hugging Face names
    settings: Mapping[str, Any] = field(default_factory=dict)  # `inference.<name>.engine_settings`
    version: int = 0  # of the initial weights
    on_tokens: Callable[[int, float], None] | None = None  # called with the number of new tokens, and the time


@dataclass(slots=True, eq=False)
class _Live:
    """A request that is being generated."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    marks: list[tuple[int, int, bool]] = field(default_factory=list)  # (first token, version, mixed cache)
    aborted: bool = False

    def segments(self) -> tuple[Segment, ...]:
        ends = [start for start, _, _ in self.marks[1:]] + [len(self.tokens)]
        return tuple(
            Segment.policy(self.tokens[start:end], self.logprobs[start:end], version, mixed)
            for (start, version, mixed), end in zip(self.marks, ends, strict=True)
            if end > start
        )


class StreamingEngine:
    """An engine by its token streams. Subclasses write ``tokens``, and ``load`` where they have weights."""

    has_weights: ClassVar[bool] = True
    recomputes: ClassVar[bool] = False
    """Whether a stream that goes on after ``load`` recomputes its KV cache of older weights. If False, later tokens of the
    stream are marked ``mixed_cache``."""

    def __init__(self, setup: EngineSetup) -> None:
        self.setup = setup
        self._slots = asyncio.Semaphore(setup.num_slots)
        self._live: dict[str, _Live] = {}
        self._open = asyncio.Event()  # steps begin only while this is set
        self._open.set()
        self._between = asyncio.Condition()  # notified when a step ends
        self._stepping = 0
        self._running = 0
        self._version = setup.version
        self._generated = 0
        self._failure = "the engine is not started"

    # -- methods of a subclass -------------------------------------------------------------------------------------

    def tokens(self, request: GenerationRequest) -> AsyncIterator[tuple[int, float]]:
        """Yield (token id, log-probability) one by one: of the distribution that the token was drawn from, at the request's
        temperature. The end of the stream ends the turn as if its budget had run out."""
        raise NotImplementedError

    async def load(self, update: WeightUpdate) -> None:
        """Take newer weights. ``update.whole`` has whole tensors by name, ``update.changes`` single elements;
        other tensors keep their values unless ``update.complete``."""

    # -- the protocol ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Get ready; called once, before the first request."""
        self._failure = ""

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample one continuation."""
        if self._failure:
            raise InfrastructureError(f"engine: {self._failure}")
        if request.request_id in self._live:
            raise InvalidRequestError(f"request {request.request_id!r} is already being generated")
        check_request(request, context_length=self.setup.context_length)
        if request.sampling.is_truncated and request.record_kept:
            raise InvalidRequestError(
                f"request {request.request_id!r}: {type(self).__name__} does not tell which tokens top_k, top_p and min_p "
                "keep; write top_p 1, top_k 0 and min_p 0"
            )
        live = self._live[request.request_id] = _Live()
        try:
            async with self._slots:
                self._running += 1
                try:
                    return await self._play(request, live)
                finally:
                    self._running -= 1
        finally:
            del self._live[request.request_id]

    async def _play(self, request: GenerationRequest, live: _Live) -> Generation:
        live.marks.append((0, self._version, False))
        room = min(request.sampling.max_new_tokens, self.setup.context_length - len(request.prompt_ids))
        end = FinishReason.LENGTH
        stream = self.tokens(request)
        if not isinstance(stream, AsyncGenerator):
            raise ConfigError(
                f"{type(self).__name__}.tokens is no async generator: write `{TOKENS['tokens']}` with `yield`"
            )
        async with aclosing(stream):
            while len(live.tokens) < room:
                if live.aborted:
                    end = FinishReason.ABORTED
                    break
                step = await self._step(stream)
                if step is None:
                    break
                live.tokens.append(int(step[0]))
                live.logprobs.append(float(step[1]))
                stops = step[0] in request.stop_token_ids and len(live.tokens) > request.sampling.min_new_tokens
                if stops or (request.watch is not None and request.watch(int(step[0]))):
                    end = FinishReason.STOP
                    break
        self._generated += len(live.tokens)
        if self.setup.on_tokens is not None and live.tokens:
            self.setup.on_tokens(len(live.tokens), time.time())
        return Generation(segments=live.segments(), finish_reason=end)

    async def _step(self, stream: AsyncGenerator[tuple[int, float], None]) -> tuple[int, float] | None:
        """The next token; None at the end of the stream. A fault of the subclass is an infrastructure failure."""
        await self._open.wait()  # no deadline: until `resume`
        if self._failure:
            raise InfrastructureError(f"engine: {self._failure}")
        self._stepping += 1
        try:
            return await anext(stream)
        except StopAsyncIteration:
            return None
        except RollmillError:
            raise
        except Exception as error:
            raise InfrastructureError(f"{type(self).__name__}.tokens raised {told(error)}") from error
        finally:
            self._stepping -= 1
            async with self._between:
                self._between.notify_all()

    async def score(self, request: ScoreRequest) -> Logprobs:
        """Refused: name the teacher's model in `teacher_model`, or override this."""
        raise ConfigError(
            f"{type(self).__name__} cannot score tokens: write another engine, or teacher_model for teacher"
        )

    async def abort(self, request_id: str) -> None:
        """End a request before its next token."""
        if live := self._live.get(request_id):
            live.aborted = True

    async def pause(self) -> None:
        """Return when no request is in a step."""
        self._open.clear()
        async with deadline(PAUSE_S, f"the steps of {type(self).__name__}"), self._between:
            await self._between.wait_for(lambda: not self._stepping)

    async def resume(self) -> None:
        """Continue the requests."""
        self._open.set()

    async def update(self, update: WeightUpdate) -> float:
        """Load newer weights between two steps; returns the seconds without generation."""
        was_open = self._open.is_set()
        began = time.monotonic()
        await self.pause()
        try:
            await self.load(update)
            self._version = update.version
            for live in self._live.values():
                if live.marks:
                    mixed = bool(live.tokens) and not self.recomputes
                    live.marks.append((len(live.tokens), update.version, mixed))
        finally:
            if was_open:
                await self.resume()
        return time.monotonic() - began

    async def flush(self) -> None:
        """Forget cached prefixes; a subclass with a prefix cache overrides this method."""

    @property
    def version(self) -> int:
        """The weights that the next token is computed with."""
        return self._version

    def health(self) -> EngineHealth:
        """Whether the engine runs, and its numbers of requests."""
        return EngineHealth(
            ok=not self._failure,
            detail=self._failure or ("running" if self._open.is_set() else "paused"),
            running=self._running,
            waiting=len(self._live) - self._running,
            free_slots=self.setup.num_slots - self._running,
            generated_tokens=self._generated + sum(len(live.tokens) for live in self._live.values()),
        )

    async def stop(self) -> None:
        """End; requests that are still there fail."""
        self._failure = "the engine is stopped"
        self._open.set()


def check_engine(kind: Any, path: str) -> None:
    """Check the class that ``inference.<name>.engine`` names. Raises ``ConfigError`` with the line to write."""
    where = f"engine {path}"
    check_methods(kind, where, ENGINE_METHODS)
    check_call(kind, where, "def __init__(self, setup)", "setup")
    if not (inspect.isclass(kind) and issubclass(kind, StreamingEngine)):
        return
    if kind.tokens is StreamingEngine.tokens:
        raise ConfigError(f"{place_of(kind)}the class {where} lacks a method: write `{TOKENS['tokens']}` with `yield`")
    check_call(kind.tokens, f"{where}.tokens", TOKENS["tokens"], "self", "request")
    if inspect.iscoroutinefunction(kind.tokens):
        raise ConfigError(
            f"{place_of(kind.tokens)}{where}.tokens is no async generator: write `{TOKENS['tokens']}` with `yield`, not `return`"
        )


# --- Runs memory-bound work on a few threads: numpy and digests release the interpreter lock while they move bytes.


SCATTERED_BYTES = 64  # that a write of one scattered element moves: a cache line
_MOST_THREADS = 2  # they run beside generation, and two move bytes about as fast as the memory of a small machine does
_WORTH_BYTES = 16 << 20  # starting a thread takes as long as moving a few MiB


def num_threads() -> int:
    """How many this process should use at once."""
    return min(_MOST_THREADS, len(os.sched_getaffinity(0)))


@contextmanager
def few_threads(name: str) -> Iterator[ThreadPoolExecutor]:
    """A thread pool for the block; a failure in the block cancels the calls that have not begun."""
    pool = ThreadPoolExecutor(num_threads(), name)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def run_all(calls: Sequence[Callable[[], object]], *, touched_bytes: int, name: str) -> None:
    """Run every call, in any order; on several threads if ``touched_bytes`` is large enough to pay for them.

    Raises the first failing call's error; the other calls may have run or not.
    """
    if touched_bytes < _WORTH_BYTES or num_threads() == 1:
        for call in calls:
            call()
        return
    # Each thread takes the next call after each call: a future per call would cost more than a short call.
    remaining = iter(calls)

    def work() -> None:
        for call in remaining:
            call()

    with few_threads(name) as pool:
        for ended in [pool.submit(work) for _ in range(num_threads())]:
            ended.result()


# --- Changes a model's weights in place: values are prepared beforehand, so that the pause covers only the writing.


# numpy scatters into a tensor's memory about 1.5 times faster than torch's index_copy_ does, and copies bfloat16 twice as
# fast as copy_; it has no bfloat16.
_SIGNED = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, slots=True)
class PreparedUpdate:
    """Ready to be written. Writes to host memory may run in several threads; each of them names the bytes that it touches."""

    version: int
    on_host: list[tuple[Callable[[], object], int]]
    others: list[Callable[[], object]]  # to a device, or from another type

    def apply(self) -> None:
        touched = sum(num_bytes for _, num_bytes in self.on_host)
        run_all([write for write, _ in self.on_host], touched_bytes=touched, name="engine.write")
        for write in self.others:
            write()


def prepare(update: WeightUpdate, weights: Mapping[str, torch.Tensor]) -> PreparedUpdate:
    """``weights`` are the model's own. ``ModelMismatchError`` for a missing or unknown name or another shape."""
    check_update(update, weights)
    prepared = PreparedUpdate(update.version, on_host=[], others=[])
    for name, tensor in update.whole.items():
        values = tensor if isinstance(tensor, torch.Tensor) else torch.from_numpy(tensor)
        _copy(prepared, weights[name], values)
    for name, changes in update.changes.items():
        _change(prepared, weights[name], changes, update.dtype)
    return prepared


def _change(prepared: PreparedUpdate, own: torch.Tensor, changes: Sequence[ChunkChange], dtype: str) -> None:
    flat = own.view(-1)
    for change in changes:
        if change.positions is None:
            target = flat[change.start : change.start + len(change.values)]
            _copy(prepared, target, _cast(change.values, dtype, own))
    scattered = [(change, change.positions) for change in changes if change.positions is not None]
    if not scattered:
        return
    if own.device.type != "cpu":  # which wants few calls
        positions = np.concatenate([positions + change.start for change, positions in scattered])
        values = _cast(np.concatenate([change.values for change, _ in scattered]), dtype, own)
        prepared.others.append(partial(flat.index_copy_, 0, torch.from_numpy(positions).to(own.device), values))
        return
    # Chunk by chunk, with the decoded positions: only a cast of the values copies data.
    signed = _SIGNED[own.element_size()]
    shared = flat.view(signed).numpy()
    for change, positions in scattered:
        bits = _cast(change.values, dtype, own).view(signed).numpy()
        write = partial(shared[change.start :].__setitem__, positions, bits)
        prepared.on_host.append((write, SCATTERED_BYTES * len(positions)))


def _copy(prepared: PreparedUpdate, target: torch.Tensor, values: torch.Tensor) -> None:
    """Consecutive elements of a tensor, or the whole tensor."""
    on_host = target.device.type == values.device.type == "cpu"
    alike = target.dtype == values.dtype and target.is_contiguous() and values.is_contiguous()
    signed = _SIGNED.get(target.element_size())
    if not on_host or not alike or signed is None:
        prepared.others.append(partial(target.copy_, values))
        return
    to, bits = (tensor.detach().view(-1).view(signed).numpy() for tensor in (target, values))
    prepared.on_host.append((partial(np.copyto, to, bits), 2 * bits.nbytes))


def _cast(bits: Bits, dtype: str, own: torch.Tensor) -> torch.Tensor:
    """Bits of the published type as values of the model's type, on its device."""
    published: torch.dtype = getattr(torch, dtype)
    signed = np.ascontiguousarray(bits).view(f"i{element_type(dtype).size_bytes}")
    if not signed.flags.writeable:
        signed = signed.copy()  # a view of received bytes: torch wants memory that may be written
    return torch.from_numpy(signed).view(published).to(device=own.device, dtype=own.dtype)
