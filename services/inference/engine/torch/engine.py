"""The embedded engine: continuous batching in torch, on the CPU or one GPU, in a thread of its own.

This file connects asyncio and the engine thread. All access to the model is in that thread, between two decoding steps: an
asynchronous call puts a command into the inbox and waits for its answer.

    event loop:     generate / abort / pause / update ...  -- command -->  inbox
    engine thread:  run commands  ->  one ``Core.step``  ->  deliver finished requests  ->  again; sleeps when idle

A crash of the thread fails all waiting calls with ``InfrastructureError`` and turns ``health().ok`` off; the
process decides whether to end. Callers give the samples of a group different seeds: equal seeds give equal samples.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import numpy as np
import structlog
import torch

from services.common.aio import deadline
from services.common.errors import DeadlineError, InfrastructureError, RollmillError
from services.common.records.types import Logprobs
from services.common.system.parking import return_freed_memory
from services.inference.engine.base import EngineHealth, Generation, GenerationRequest, KvPolicy, ScoreRequest
from services.inference.engine.requests import check_request, check_score_request
from services.inference.engine.torch.blocks import Adapter
from services.inference.engine.torch.core import Core, Entry
from services.inference.engine.torch.decoder import Decoder, Stepping
from services.inference.engine.torch.keeper import Counters
from services.inference.engine.torch.slots import SlotTable
from services.inference.engine.weight_update import WeightUpdate

log = structlog.get_logger(__name__)

T = TypeVar("T")

CONTROL_TIMEOUT_S = 300.0  # a control call waits at most for one prefill round and one step, or one recompute


class TorchEngine:
    """One policy on one device. ``model`` is a loaded Hugging Face model; the engine owns it from here on.

    With ``adapter`` the model is the adapter's base: it never changes, and other engines may have it too.

    ``on_tokens`` is called in the engine thread once per decoding step with the number of tokens and the time. ``alone``, with
    one slot: the same request gets the same bits, independent of other requests (see ``Core``). ``kv_bytes`` bounds the KV
    cache; ``stepping`` beside ``eager`` needs CUDA (see ``StaticStep``).
    """

    takes_forced_tokens: ClassVar[bool] = False

    def __init__(
        self,
        model: Any,
        *,
        num_slots: int,
        context_length: int,
        kv_policy: KvPolicy = KvPolicy.RECOMPUTE,
        device: str = "cpu",
        version: int = 0,
        on_tokens: Callable[[int, float], None] | None = None,
        alone: bool = False,
        adapter: Adapter | None = None,
        kv_bytes: int | None = None,
        stepping: Stepping = "eager",
    ) -> None:
        decoder = Decoder(
            model,
            num_slots=num_slots,
            context_length=context_length,
            device=device,
            adapter=adapter,
            kv_bytes=kv_bytes,
            stepping=stepping,
        )
        table = SlotTable(num_slots, context_length)
        self._core = Core(decoder, table, kv_policy=kv_policy, version=version, on_tokens=on_tokens, alone=alone)
        self._context_length = context_length
        self._changed = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._waiters: set[_Waiter] = set()
        self._finished: list[tuple[_Waiter, Any]] = []  # of the current turn of the thread, delivered together
        self._paused = False
        self._released = False  # no memory: only commands that compute nothing
        self._held: list[Callable[[], None]] = []  # commands that wait for the memory
        self._stopping = False
        self._failure: str | None = "the engine is not started"
        self._thread = threading.Thread(target=self._run, name="torch-engine", daemon=True)

    # -- the protocol -------------------------------------------------------------------------------------------

    async def start(self) -> None:
        self._failure = None
        self._thread.start()

    async def generate(self, request: GenerationRequest) -> Generation:
        check_request(
            request,
            context_length=self._context_length,
            vocab_size=self._core.decoder.vocab_size,
            forced=self.takes_forced_tokens,
        )
        waiter = _Waiter()
        entry = Entry(request=request, done=lambda outcome: self._finished.append((waiter, outcome)))
        self._post(lambda: self._core.submit(entry), waiter)
        try:
            # Bounded by the request's token budget; a caller with a time limit cancels this task.
            result: Generation = await waiter.future
            return result
        except asyncio.CancelledError:
            self._post_quietly(lambda: self._core.withdraw(entry))
            raise

    async def score(self, request: ScoreRequest) -> Logprobs:
        check_score_request(request, context_length=self._context_length, vocab_size=self._core.decoder.vocab_size)
        # No deadline here: earlier steps and requests come first, and the rollout has a time limit.
        found = await self._call("score", lambda: self._score(request), bounded=False, computes=True)
        assert not isinstance(found, RollmillError)  # such an answer is raised
        return found

    async def abort(self, request_id: str) -> None:
        await self._call("abort", lambda: self._core.abort(request_id))

    async def pause(self) -> None:
        await self._call("pause", lambda: self._set_paused(True))

    async def resume(self) -> None:
        await self._call("resume", lambda: self._set_paused(False))

    async def update(self, update: WeightUpdate) -> float:
        if self._released:  # the weights come with the memory
            await self._call("update", lambda: self._core.announce(update.version))
            return 0.0
        # In another thread: casting and moving need not stop decoding.
        prepared = await asyncio.to_thread(self._core.decoder.prepare, update)
        return await self._call("update", lambda: self._core.update(prepared))

    async def flush(self) -> None:
        await self._call("flush", self._core.flush)

    async def release(self) -> None:
        await self._call("release", self._release)

    async def restore(self, update: WeightUpdate) -> None:
        await self._call("restore", lambda: self._restore(update))

    @property
    def version(self) -> int:
        return self._core.version

    @property
    def counters(self) -> Counters:
        return self._core.counters

    def health(self) -> EngineHealth:
        running = self._core.table.num_live
        return EngineHealth(
            ok=self._failure is None,
            detail=self._failure or ("paused" if self._paused else "running"),
            running=running,
            waiting=self._core.num_waiting,
            free_slots=self._core.table.num_free,
            generated_tokens=self._core.counters.generated,
            kv=self._core.kv_use,
        )

    async def stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, CONTROL_TIMEOUT_S)
            if self._thread.is_alive():
                raise DeadlineError(f"the engine thread did not stop within {CONTROL_TIMEOUT_S:.0f} s")
        self._failure = self._failure or "the engine is stopped"

    # -- event loop side ----------------------------------------------------------------------------------------

    async def _call(self, name: str, command: Callable[[], T], *, bounded: bool = True, computes: bool = False) -> T:
        """Run a command in the engine thread, between two steps; not when its caller has given up meanwhile.

        A caller that is gone may have changed the arrays of its update.
        """
        waiter = _Waiter()

        def run() -> None:
            if computes and self._released:
                self._held.append(run)
            else:
                self._finished.append((waiter, None if waiter.future.cancelled() else command()))

        self._post(run, waiter)
        async with deadline(CONTROL_TIMEOUT_S if bounded else None, f"engine {name}"):
            result: T = await waiter.future
        return result

    def _post(self, command: Callable[[], None], waiter: _Waiter) -> None:
        with self._changed:
            if self._failure is not None or self._stopping:
                raise InfrastructureError(f"engine: {self._failure or 'the engine is stopping'}")
            self._waiters.add(waiter)
            self._inbox.append(command)
            self._changed.notify()

    def _post_quietly(self, command: Callable[[], None]) -> None:
        with self._changed:
            self._inbox.append(command)
            self._changed.notify()

    # -- engine thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        failure = "the engine is stopped"
        try:
            with torch.inference_mode():
                while self._turn():
                    pass
        except Exception as error:  # the thread ends: the waiting calls must fail
            failure = f"the engine thread died: {type(error).__name__}: {error}"
            log.exception("engine.died")
        with self._changed:
            self._failure = failure
            orphans = list(self._waiters)
        self._finished.extend((waiter, InfrastructureError(failure)) for waiter in orphans)
        self._deliver()

    def _turn(self) -> bool:
        """Run the commands, then one step; False when the thread is to stop."""
        with self._changed:
            # Without a deadline on purpose: an idle engine waits here.
            self._changed.wait_for(lambda: self._stopping or self._inbox or self._decodes)
            commands = list(self._inbox)
            self._inbox.clear()
            if self._stopping:
                return False
        for command in commands:
            command()
        if self._decodes:
            if (held_s := self._core.holds_s()) > 0:
                self._hold(held_s)
            else:
                self._core.step()
        self._deliver()
        return True

    @property
    def _decodes(self) -> bool:
        return self._core.has_work and not self._paused and not self._released

    def _hold(self, seconds: float) -> None:
        """Wait for the next command, at most so long."""
        self._deliver()
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or bool(self._inbox), timeout=seconds)

    def _score(self, request: ScoreRequest) -> Logprobs | RollmillError:
        decoder = self._core.decoder
        found = decoder.score(
            torch.from_numpy(request.token_ids.astype(np.int64)).to(decoder.device),
            torch.from_numpy(request.positions).to(decoder.device),
            torch.from_numpy(request.temperatures).to(decoder.device),
        )
        logprobs: Logprobs = found.cpu().numpy()
        if np.isfinite(logprobs).all():
            return logprobs
        return InfrastructureError(f"scores are not finite under weight version {self.version}")

    def _release(self) -> None:
        if not self._released:
            self._released = True
            self._core.decoder.release()
            return_freed_memory()

    def _restore(self, update: WeightUpdate) -> RollmillError | None:
        decoder = self._core.decoder
        try:
            if self._released:
                decoder.restore()
            self._core.update(decoder.prepare(update), recompute=True)
        except RollmillError as error:
            return error
        self._released = False
        # They came while there was nothing to compute with.
        held, self._held = self._held, []
        for command in held:
            command()
        return None

    def _set_paused(self, paused: bool) -> None:
        self._paused = paused

    def _deliver(self) -> None:
        """Hand over outcomes, one wake-up per event loop."""
        finished, self._finished = self._finished, []
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Waiter, Any]]] = {}
        for waiter, outcome in finished:
            by_loop.setdefault(waiter.loop, []).append((waiter, outcome))
        with self._changed:
            self._waiters.difference_update(waiter for waiter, _ in finished)
        for loop, outcomes in by_loop.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_settle, outcomes)


class ReplayEngine(TorchEngine):
    """Emits ``forced_ids`` instead of sampling (teacher forcing), and refuses a request without them.

    Continuous batching, prefix caches and swaps between two steps are the same. So versions, segments and log-probabilities
    equal those of sampling the same tokens, and a whole system can be tried without a trained model. A request ends at its
    first stop token, its budget, the context, or the end of ``forced_ids``. Recipes select this engine with ``engine: forced``.

    The log-probability of a token is taken under the request's sampling distribution. A token that top-k or top-p leaves
    out could never have been drawn; such a token is added to the kept tokens: p(token) / (p(kept) + p(token)).
    """

    takes_forced_tokens: ClassVar[bool] = True


class _Waiter:
    """A future together with its event loop."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()


def _settle(outcomes: list[tuple[_Waiter, Any]]) -> None:
    for waiter, outcome in outcomes:
        if waiter.future.done():
            continue  # cancelled meanwhile
        if isinstance(outcome, RollmillError):
            waiter.future.set_exception(outcome)
        else:
            waiter.future.set_result(outcome)
