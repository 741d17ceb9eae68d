"""Base class of engines that a recipe names by import path: a subclass yields tokens, one request at a time.

    class Engine(rollmill.Engine):
        async def tokens(self, request):                 # (token id, log-probability), one after the other
            ...
        async def load(self, update):                    # newer weights
            ...

The base class does the rest of the ``Engine`` protocol: slots, budgets, stop tokens, and the weight version of each token. A step is the time between two tokens of one request; ``load`` runs while no request is in a step.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, ClassVar

from services.common.aio import deadline
from services.common.errors import ConfigError, InfrastructureError, InvalidRequestError, RollmillError
from services.common.importing import check_call, check_methods, place_of, told
from services.common.records import Logprobs
from services.inference.engine.base import (
    EngineHealth,
    FinishReason,
    Generation,
    GenerationRequest,
    Mark,
    ScoreRequest,
    WeightUpdate,
    check_request,
    segments_by,
)

PAUSE_S = 60.0  # until every request has taken its step

ENGINE_METHODS = {
    "start": "async def start(self)",
    "generate": "async def generate(self, request) -> Generation",
    "update": "async def update(self, update) -> float",
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
class Live:
    """A request that is being generated."""

    tokens: Any = field(default_factory=list)  # list or array of ints
    logprobs: Any = field(default_factory=list)  # the same of floats
    marks: list[Mark] = field(default_factory=list)


class StreamingEngine:
    """An engine by its token streams. Subclasses write ``tokens``, and ``load`` where they have weights."""

    has_weights: ClassVar[bool] = True
    recomputes: bool = False
    """Whether a stream that goes on after ``load`` recomputes its KV cache of older weights. If False, later tokens of the
    stream are marked ``mixed_cache``."""

    def __init__(self, setup: EngineSetup) -> None:
        self.setup = setup
        self._slots = asyncio.Semaphore(setup.num_slots)
        self._live: dict[str, Live] = {}
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
        live = self._live[request.request_id] = Live()
        try:
            async with self._slots:
                self._running += 1
                try:
                    return await self._play(request, live)
                finally:
                    self._running -= 1
        finally:
            del self._live[request.request_id]

    async def _play(self, request: GenerationRequest, live: Live) -> Generation:
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
                step = await self._step(stream)
                if step is None:
                    break
                live.tokens.append(int(step[0]))
                live.logprobs.append(float(step[1]))
                stops = step[0] in request.stop_token_ids and len(live.tokens) > request.sampling.min_new_tokens
                if stops or (request.watch is not None and request.watch(int(step[0]))):
                    end = FinishReason.STOP
                    break
        return self._generation(live, end)

    def _generation(self, live: Live, end: FinishReason) -> Generation:
        num_tokens = len(live.tokens)
        self._generated += num_tokens
        if self.setup.on_tokens is not None and num_tokens:
            self.setup.on_tokens(num_tokens, time.time())
        return Generation(segments=segments_by(live.marks, live.tokens, live.logprobs), finish_reason=end)

    async def _step(self, stream: AsyncGenerator[tuple[int, float], None]) -> tuple[int, float] | None:
        """The next token; None at the end of the stream. A fault of the subclass is an infrastructure failure."""
        await self._open.wait()  # during a `load`, which the caller of `update` bounds
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

    async def update(self, update: WeightUpdate) -> float:
        """Load newer weights between two steps; returns the seconds without generation."""
        began = time.monotonic()
        self._open.clear()
        try:
            async with deadline(PAUSE_S, f"the steps of {type(self).__name__}"), self._between:
                await self._between.wait_for(lambda: not self._stepping)
            await self.load(update)
            self._version = update.version
            for live in self._live.values():
                if live.marks:
                    mixed = len(live.tokens) > 0 and not self.recomputes
                    live.marks.append((len(live.tokens), update.version, mixed))
        finally:
            self._open.set()
        return time.monotonic() - began

    @property
    def version(self) -> int:
        """The weights that the next token is computed with."""
        return self._version

    def health(self) -> EngineHealth:
        """Whether the engine runs, and its numbers of requests."""
        return EngineHealth(
            ok=not self._failure,
            detail=self._failure or "running",
            running=self._running,
            waiting=len(self._live) - self._running,
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
