"""The embedded engine: continuous batching in torch, on the CPU or one GPU, in a thread of its own.

This file connects asyncio and the engine thread. All access to the model is in that thread, between two decoding steps: an
asynchronous call puts a command into the inbox and waits for its answer.

    event loop:     generate / score / update ...  -- command -->  inbox
    engine thread:  run commands  ->  one ``Core.step``  ->  deliver finished requests  ->  again; sleeps when idle

A crash of the thread fails all waiting calls with ``InfrastructureError`` and turns ``health().ok`` off; the
process decides whether to end. Callers give the samples of a group different seeds: equal seeds give equal samples.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, TypeVar

import numpy as np
import structlog
import torch

from services.common.aio import deadline
from services.common.config.processes import blocks_of
from services.common.errors import DeadlineError, InfrastructureError, InvalidRequestError, RollmillError
from services.common.kept_tokens import KeptRow
from services.common.records import Logprobs
from services.common.system.parking import return_freed_memory
from services.common.telemetry.logs import LogEvent
from services.inference.engine.base import (
    EngineHealth,
    FinishReason,
    Generation,
    GenerationRequest,
    KvPolicy,
    Mark,
    ScoreRequest,
    WeightUpdate,
    check_request,
    check_score_request,
    segments_by,
)
from services.inference.engine.torch.blocks import Adapter
from services.inference.engine.torch.decoder import Decoder, PreparedUpdate, Stepping, prepare
from services.inference.engine.torch.keeper import MAX_PASS_TOKENS, Counters, KvKeeper
from services.inference.engine.torch.slots import Gathering, SlotTable, sample, worth_sharing

# --- Continuous batching in steps: requests join free slots, decode together, and leave.


log = structlog.get_logger(__name__)
ADMIT_TOKENS = 4 * MAX_PASS_TOKENS  # prompt tokens admitted before the rows already running get their next token
TAKEOVER_LOSS = 4  # a free slot is taken over, not copied, when at most this many cached positions are lost


@dataclass(slots=True, eq=False)
class Entry:
    """A request inside the engine. ``done`` is called once, with the generation or the error."""

    request: GenerationRequest
    done: Callable[[Generation | RollmillError], None]
    marks: list[Mark] = field(default_factory=list)  # by positions of the slot
    slot: int = -1
    kept: list[KeptRow] = field(default_factory=list)  # of the first generated tokens only


class Core:
    def __init__(
        self,
        decoder: Decoder,
        table: SlotTable,
        *,
        kv_policy: KvPolicy,
        version: int,
        on_tokens: Callable[[int, float], None] | None = None,
        alone: bool = False,
    ) -> None:
        """``alone``: a request is computed by itself, from its first token, so that its result does not depend on other
        requests, running or finished; needs a table of one slot."""
        if alone and table.num_slots != 1:
            raise ValueError(f"alone needs a table of one slot, not of {table.num_slots}")
        self._alone = alone
        self.decoder = decoder
        self.table = table
        self.version = version
        self.counters = Counters()
        self.kv = KvKeeper(decoder, table, self.counters)
        self._kv_policy = kv_policy
        self._on_tokens = on_tokens
        self._waiting: deque[Entry] = deque()
        self._rows: list[Entry | None] = [None] * table.num_slots
        self._by_id: dict[str, Entry] = {}
        self._watched: dict[str, Entry] = {}  # of these, the requests with a ``watch``
        self._gathering = Gathering()

    # -- calls between two steps -------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._by_id)

    @property
    def num_waiting(self) -> int:
        """Requests that have not joined yet."""
        return len(self._waiting)

    def holds_s(self) -> float:
        """Seconds that the next step waits for requests that may join; 0 when the step is due."""
        if self._alone:
            return 0.0
        return self._gathering.holds_s(self.num_waiting, self.table.num_live, time.monotonic())

    def submit(self, entry: Entry) -> None:
        request_id = entry.request.request_id
        if request_id in self._by_id:
            entry.done(InvalidRequestError(f"request {request_id!r} is already being generated"))
            return
        self._by_id[request_id] = entry
        if entry.request.watch is not None:
            self._watched[request_id] = entry
        self._waiting.append(entry)

    def withdraw(self, entry: Entry) -> None:
        """End a request without an answer; another one may have its id by now."""
        if self._by_id.get(entry.request.request_id) is entry:
            self._release(entry)

    def announce(self, version: int) -> None:
        """Name the version under which the next step computes; its weights come before that step."""
        self.version = version

    def update(self, prepared: PreparedUpdate, *, recompute: bool = False) -> float:
        """Write a prepared version; live rows go on under the new version. Returns the seconds of the write.

        ``recompute``: the caches are gone, also with the policy to keep them.
        """
        started = time.perf_counter()
        self.decoder.load(prepared)
        version = self.version = prepared.version
        table = self.table
        recompute = recompute or self._kv_policy is KvPolicy.RECOMPUTE
        self.kv.forget(live=recompute)
        live = np.flatnonzero(table.live)
        if recompute:
            table.mixed[live] = False
            self.kv.compute(live.tolist())
        else:
            table.mixed[live] = table.cached[live] > 0
        for slot in live.tolist():
            self._mark(slot)
        if self.decoder.device.type == "cuda":
            torch.cuda.synchronize(self.decoder.device)  # measures the device's work, not its submission
        seconds = time.perf_counter() - started
        log.info(
            LogEvent.ENGINE_UPDATED,
            version=version,
            live=len(live),
            kv=self._kv_policy.value,
            seconds=round(seconds, 4),
        )
        return seconds

    # -- one step ---------------------------------------------------------------------------------------------

    def step(self) -> None:
        table = self.table
        began = time.monotonic()
        if self._gathering.joins(self.num_waiting, table.num_live, table.num_free):
            self._admit()
        self.kv.grow()
        slots = np.flatnonzero(table.live)
        if not len(slots):
            return
        slots = self.decoder.arranged(slots, table.length[slots])
        logits = self.decoder.decode(slots, *table.last_tokens(slots))
        if table.is_plain:
            drawn = self.decoder.draw(logits, table.uniform(slots))
        else:
            drawn = sample(logits, table.sampling_rows(slots))
        broken = slots[~np.isfinite(drawn.logprobs)]
        for slot in broken.tolist():
            self._break(slot)
        for row, kept in drawn.kept.items():
            if (entry := self._rows[slots[row]]) is not None:
                entry.kept.append(kept)
        num_emitted = len(slots) - len(broken)
        stopped, full = table.append(slots, drawn.tokens, drawn.logprobs)
        self.counters.steps += 1
        self._gathering.decoded(began, time.monotonic())
        self.counters.generated += num_emitted
        if self._on_tokens is not None:
            self._on_tokens(num_emitted, time.time())
        for slots, reason in ((stopped, FinishReason.STOP), (full, FinishReason.LENGTH)):
            for slot in slots.tolist():
                entry = self._rows[slot]
                assert entry is not None
                self._finish(entry, reason)
        # A request that ended for another reason above does not get its last token here: the result has the token.
        for entry in [entry for entry in self._watched.values() if entry.slot >= 0]:
            last = int(table.tokens[entry.slot, table.length[entry.slot] - 1])
            if entry.request.watch is not None and entry.request.watch(last):
                self._finish(entry, FinishReason.STOP)

    def _admit(self) -> None:
        table = self.table
        if self._alone:
            self.kv.forget()  # a prefix that an earlier request left was rounded in other shapes
        batch = self._next_batch()
        # Continued conversations first: another request must not take their slots in the same round.
        newcomers = []
        for entry in batch:
            prompt = np.asarray(entry.request.prompt_ids, dtype=np.int32)
            source, shared = table.longest_prefix(prompt)
            # Taken over: a free slot whose whole cache is a prefix of the prompt.
            is_whole = not table.live[source] and table.cached[source] - shared <= TAKEOVER_LOSS
            if worth_sharing(shared, len(prompt) - 1) and is_whole:
                self._place(entry, source, prompt, source, shared)
            else:
                newcomers.append((entry, prompt))
        for entry, prompt in newcomers:
            source, shared = table.longest_prefix(prompt)
            free = table.free_slot()
            assert free is not None
            self._place(entry, free, prompt, source, shared if worth_sharing(shared, len(prompt) - 1) else 0)
        self.kv.compute([entry.slot for entry in batch])

    def _next_batch(self) -> list[Entry]:
        """Waiting requests that have slots, and memory for all their tokens, in their order."""
        batch: list[Entry] = []
        num_tokens = 0
        num_free, room = self.table.num_free, self.kv.room()
        while self._waiting and len(batch) < num_free and num_tokens < ADMIT_TOKENS:
            request = self._waiting[0].request
            num_prompt = len(request.prompt_ids)
            room -= blocks_of(min(num_prompt + request.sampling.max_new_tokens, self.table.context_length))
            if room < 0:
                break
            batch.append(self._waiting.popleft())
            num_tokens += num_prompt
        return batch

    def _place(self, entry: Entry, slot: int, prompt: Any, source: int, cached: int) -> None:
        request = entry.request
        seed = secrets.randbits(64) if request.seed is None else request.seed
        self.kv.attach(slot, source, cached)
        self.table.occupy(
            slot,
            prompt,
            cached,
            request.sampling,
            request.stop_token_ids,
            seed,
            request.forced_ids,
            request.record_kept,
        )
        self._rows[slot] = entry
        entry.slot = slot
        self._mark(slot)
        self.counters.reused += cached

    def _mark(self, slot: int) -> None:
        """From here on the tokens of the slot's request belong to the current version."""
        entry = self._rows[slot]
        assert entry is not None
        mark = (self.version, bool(self.table.mixed[slot]))
        if not entry.marks or entry.marks[-1][1:] != mark:
            entry.marks.append((int(self.table.length[slot]), *mark))

    def _break(self, slot: int) -> None:
        """Fail one row with a log-probability that is not finite."""
        entry = self._rows[slot]
        assert entry is not None
        self.kv.clear(slot)
        self._release(entry)
        log.error("engine.not_finite", request=entry.request.request_id, version=self.version)
        entry.done(InfrastructureError(f"logits are not finite under weight version {self.version}"))

    def _finish(self, entry: Entry, reason: FinishReason) -> None:
        first = entry.marks[0][0]
        of = entry.slot, slice(first, int(self.table.length[entry.slot]))
        segments = segments_by(
            [(start - first, version, mixed) for start, version, mixed in entry.marks],
            self.table.tokens[of].copy(),
            self.table.logprobs[of].copy(),
            entry.kept,
        )
        self._release(entry)
        entry.done(Generation(segments=segments, finish_reason=reason))

    def _release(self, entry: Entry) -> None:
        del self._by_id[entry.request.request_id]
        self._watched.pop(entry.request.request_id, None)
        if entry.slot < 0:
            self._waiting.remove(entry)
        else:
            self._rows[entry.slot] = None
            self.table.release(entry.slot)
            self.kv.released(entry.slot)


T = TypeVar("T")
CONTROL_TIMEOUT_S = 300.0  # a control call waits at most for one prefill round and one step, or one recompute


class TorchEngine:
    """One policy on one device. ``model`` is a loaded Hugging Face model; the engine owns it from here on.

    With ``adapter`` the model is the adapter's base: it never changes, and other engines may have it too.

    ``on_tokens`` is called in the engine thread once per decoding step with the number of tokens and the time. ``alone``, with
    one slot: the same request gets the same bits, independent of other requests (see ``Core``). ``kv_bytes`` bounds the KV
    cache; ``stepping`` beside ``eager`` needs CUDA (``extras/compiled``).
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
        self._loop: asyncio.AbstractEventLoop | None = None  # of all callers
        self._waiters: set[asyncio.Future[Any]] = set()
        # Of the current turn of the thread, delivered together.
        self._finished: list[tuple[asyncio.Future[Any], Any]] = []
        self._released = False  # no memory: only commands that compute nothing
        self._held: list[Callable[[], None]] = []  # commands that wait for the memory
        self._stopping = False
        self._failure: str | None = "the engine is not started"
        self._thread = threading.Thread(target=self._run, name="torch-engine", daemon=True)

    # -- the protocol -------------------------------------------------------------------------------------------

    async def start(self) -> None:
        self._failure = None
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def generate(self, request: GenerationRequest) -> Generation:
        check_request(
            request,
            context_length=self._context_length,
            vocab_size=self._core.decoder.vocab_size,
            forced=self.takes_forced_tokens,
        )
        waiter: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        entry = Entry(request=request, done=lambda outcome: self._finished.append((waiter, outcome)))
        self._post(lambda: self._core.submit(entry), waiter)
        try:
            # Bounded by the request's token budget; a caller with a time limit cancels this task.
            return await waiter
        except asyncio.CancelledError:
            with self._changed:
                self._waiters.discard(waiter)
                self._inbox.append(lambda: self._core.withdraw(entry))
                self._changed.notify()
            raise

    async def score(self, request: ScoreRequest) -> Logprobs:
        check_score_request(request, context_length=self._context_length, vocab_size=self._core.decoder.vocab_size)
        # No deadline here: earlier steps and requests come first, and the rollout has a time limit.
        found = await self._call("score", lambda: self._score(request), bounded=False, computes=True)
        assert not isinstance(found, RollmillError)  # such an answer is raised
        return found

    async def update(self, update: WeightUpdate) -> float:
        if self._released:  # the weights come with the memory
            await self._call("update", lambda: self._core.announce(update.version))
            return 0.0
        # In another thread: casting and moving need not stop decoding.
        prepared = await asyncio.to_thread(prepare, update, self._core.decoder.weights)
        return await self._call("update", partial(self._core.update, prepared))

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
            detail=self._failure or ("released" if self._released else "running"),
            running=running,
            waiting=self._core.num_waiting,
            generated_tokens=self._core.counters.generated,
            kv=self._core.kv.use,
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
        waiter: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def run() -> None:
            if computes and self._released:
                self._held.append(run)
            else:
                self._finished.append((waiter, None if waiter.cancelled() else command()))

        self._post(run, waiter)
        async with deadline(CONTROL_TIMEOUT_S if bounded else None, f"engine {name}"):
            return await waiter

    def _post(self, command: Callable[[], None], waiter: asyncio.Future[Any]) -> None:
        with self._changed:
            if self._failure is not None or self._stopping:
                raise InfrastructureError(f"engine: {self._failure or 'the engine is stopping'}")
            self._waiters.add(waiter)
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
            while not (self._stopping or self._inbox or self._decodes):
                self._changed.wait()  # without a deadline: the engine is idle
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
        return self._core.has_work and not self._released

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
            self._core.update(prepare(update, decoder.weights), recompute=True)
        except RollmillError as error:
            return error
        self._released = False
        # They came while there was nothing to compute with.
        held, self._held = self._held, []
        for command in held:
            command()
        return None

    def _deliver(self) -> None:
        """Hand over outcomes, with one wake-up of the event loop."""
        finished, self._finished = self._finished, []
        with self._changed:
            self._waiters.difference_update(waiter for waiter, _ in finished)
        if finished and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_settle, finished)


class ReplayEngine(TorchEngine):
    """Emits ``forced_ids`` instead of sampling (teacher forcing), and refuses a request without them.

    Continuous batching, prefix caches and swaps between two steps are the same. So versions, segments and log-probabilities
    equal those of sampling the same tokens, and a whole system can be tried without a trained model. A request ends at its
    first stop token, its budget, the context, or the end of ``forced_ids``. Recipes select this engine with ``engine: forced``.

    The log-probability of a token is taken under the request's sampling distribution. A token that top-k or top-p leaves
    out could never have been drawn; such a token is added to the kept tokens: p(token) / (p(kept) + p(token)).
    """

    takes_forced_tokens: ClassVar[bool] = True


def _settle(outcomes: list[tuple[asyncio.Future[Any], Any]]) -> None:
    for waiter, outcome in outcomes:
        if waiter.done():
            continue  # cancelled meanwhile
        if isinstance(outcome, RollmillError):
            waiter.set_exception(outcome)
        else:
            waiter.set_result(outcome)
