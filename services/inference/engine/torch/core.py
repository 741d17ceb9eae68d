"""Continuous batching in steps: requests join free slots, decode together, and leave.

Synchronous and single-threaded, without asyncio; ``TorchEngine`` runs the steps in a thread.

One step:  admit waiting requests into free slots  ->  compute their prompts' KV (all but the last token)
           ->  feed the last token of every row  ->  sample  ->  finish rows

Invariants: the last token of a row is never in the KV cache before its decoding step, so prompts, continued
conversations and rows recomputed after an update all go on through the same step; a token's log-probability and
version belong to the weights that computed it.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import structlog
import torch

from services.common.errors import InfrastructureError, InvalidRequestError, RollmillError
from services.common.records.kept_tokens import KeptRow, pack
from services.common.records.types import Segment
from services.common.telemetry.log_events import LogEvent
from services.inference.engine.base import FinishReason, Generation, GenerationRequest, KvPolicy, KvUse
from services.inference.engine.in_place import PreparedUpdate
from services.inference.engine.torch.decoder import Decoder
from services.inference.engine.torch.keeper import MAX_PASS_TOKENS, Counters, KvKeeper
from services.inference.engine.torch.sampler import sample
from services.inference.engine.torch.slots import Gathering, SlotTable, worth_sharing

log = structlog.get_logger(__name__)

ADMIT_TOKENS = 4 * MAX_PASS_TOKENS  # prompt tokens admitted before the rows already running get their next token
TAKEOVER_LOSS = 4  # a free slot is taken over, not copied, when at most this many cached positions are lost


@dataclass(slots=True, eq=False)
class Entry:
    """A request inside the engine. ``done`` is called once, with the generation or the error."""

    request: GenerationRequest
    done: Callable[[Generation | RollmillError], None]
    marks: list[tuple[int, int, bool]] = field(default_factory=list)  # (first position, version, mixed cache)
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
        self._kv = KvKeeper(decoder, table, self.counters)
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
        """Requests without a place in the decoding steps: not yet joined, or parked."""
        return len(self._waiting) + self.table.num_parked

    @property
    def kv_use(self) -> KvUse:
        return self._kv.use

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

    def abort(self, request_id: str) -> None:
        entry = self._by_id.get(request_id)
        if entry is not None:
            self._finish(entry, FinishReason.ABORTED)

    def withdraw(self, entry: Entry) -> None:
        """Abort exactly this entry; another one may have its id by now."""
        if self._by_id.get(entry.request.request_id) is entry:
            self._finish(entry, FinishReason.ABORTED)

    def flush(self) -> None:
        self._kv.forget()

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
        self._kv.forget()
        live = np.flatnonzero(table.live)
        if recompute or self._kv_policy is KvPolicy.RECOMPUTE:
            self._kv.invalidate(live)
            table.mixed[live] = False
            self._kv.compute(live.tolist())
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
        if self._gathering.joins(self.num_waiting, table.num_live, table.num_free + table.num_parked):
            self._admit()
        self._kv.grow()
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
            self._kv.forget()  # a prefix that an earlier request left was rounded in other shapes
        revived = self._kv.revive()
        for slot in revived:
            self._mark(slot)
        batch = [] if table.num_parked else self._next_batch()
        # Continued conversations first: another request must not take their slots in the same round.
        newcomers: list[tuple[Entry, Any, int, int]] = []
        known: dict[tuple[int, ...], tuple[Any, int, int]] = {}  # equal prompts come together: a task group's
        for entry in batch:
            ids = entry.request.prompt_ids
            if ids not in known:
                prompt = np.asarray(ids, dtype=np.int32)
                known[ids] = (prompt, *table.longest_prefix(prompt))
            prompt, source, shared = known[ids]
            # Taken over: a free slot whose whole cache is a prefix of the prompt.
            is_whole = not table.live[source] and table.cached[source] - shared <= TAKEOVER_LOSS
            if worth_sharing(shared, len(prompt) - 1) and is_whole:
                self._place(entry, source, prompt, source, shared)
                known.clear()  # slots have changed
            else:
                newcomers.append((entry, prompt, source, shared))
        for entry, prompt, source, shared in newcomers:
            # In this round another request may have taken the source.
            if worth_sharing(shared, len(prompt) - 1) and not table.holds(source, prompt[:shared]):
                source, shared = table.longest_prefix(prompt)
            free = table.free_slot()
            assert free is not None
            self._place(entry, free, prompt, source, shared if worth_sharing(shared, len(prompt) - 1) else 0)
        self._kv.compute([*revived, *(entry.slot for entry in batch)])

    def _next_batch(self) -> list[Entry]:
        """Waiting requests that have slots and memory, in their order."""
        batch: list[Entry] = []
        num_tokens = 0
        num_free, room = self.table.num_free, self._kv.room()
        seen: set[tuple[int, ...]] = set()
        while self._waiting and len(batch) < num_free and num_tokens < ADMIT_TOKENS:
            ids = self._waiting[0].request.prompt_ids
            if room is not None:
                # Of equal prompts one is held: the others need the block they write into, and the next one.
                price = 2 if ids in seen else self._kv.price(np.asarray(ids, dtype=np.int32))
                if price > room and (batch or self.table.num_live):
                    break
                room -= price + 1
                seen.add(ids)
            batch.append(self._waiting.popleft())
            num_tokens += len(ids)
        return batch

    def _place(self, entry: Entry, slot: int, prompt: Any, source: int, cached: int) -> None:
        request = entry.request
        seed = secrets.randbits(64) if request.seed is None else request.seed
        self._kv.attach(slot, source, cached)
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
        self._kv.clear(slot)
        self._release(entry)
        log.error("engine.not_finite", request=entry.request.request_id, version=self.version)
        entry.done(InfrastructureError(f"logits are not finite under weight version {self.version}"))

    def _finish(self, entry: Entry, reason: FinishReason) -> None:
        generation = Generation(segments=self._segments(entry), finish_reason=reason)
        self._release(entry)
        entry.done(generation)

    def _release(self, entry: Entry) -> None:
        del self._by_id[entry.request.request_id]
        self._watched.pop(entry.request.request_id, None)
        if entry.slot < 0:
            self._waiting.remove(entry)
        else:
            self._rows[entry.slot] = None
            self.table.release(entry.slot)
            self._kv.released(entry.slot)

    def _segments(self, entry: Entry) -> tuple[Segment, ...]:
        if entry.slot < 0:
            return ()
        slot, table = entry.slot, self.table
        ends = [start for start, _, _ in entry.marks[1:]] + [int(table.length[slot])]
        first = entry.marks[0][0]
        return tuple(
            Segment.policy(
                table.tokens[slot, start:end].copy(),
                table.logprobs[slot, start:end].copy(),
                version,
                mixed,
                pack(entry.kept[start - first : end - first], end - start),
            )
            for (start, version, mixed), end in zip(entry.marks, ends, strict=True)
            if end > start
        )
