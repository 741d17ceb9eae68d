"""Continuous batching, one step at a time: requests join free slots, decode together, and leave.

Synchronous and single-threaded; ``TorchEngine`` gives it a thread. It knows nothing about asyncio.

One step:  admit waiting requests into free slots  ->  compute their prompts' KV (all but the last token)
           ->  compact or reorder rows if that pays  ->  feed the last token of every row  ->  sample  ->  finish rows

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

from services.common.errors import InfrastructureError, InvalidRequestError, MillraceError
from services.common.kept_tokens import KeptRow, pack
from services.common.types import Segment
from services.inference.engine.base import FinishReason, Generation, GenerationRequest, KvPolicy
from services.inference.engine.batching import bucket_bounds, plan_moves
from services.inference.engine.decoder import Bucket, Decoder
from services.inference.engine.in_place import PreparedUpdate
from services.inference.engine.prefill import MAX_PASS_TOKENS, Span, plan_passes, plan_sharing
from services.inference.engine.sampler import sample
from services.inference.engine.slots import MIN_SHARED, SlotTable

log = structlog.get_logger(__name__)

ADMIT_TOKENS = 4 * MAX_PASS_TOKENS  # prompt tokens admitted before the rows already running get their next token
SORT_EVERY = 16  # decoding steps between two looks at whether ordering rows by length pays
TAKEOVER_LOSS = 4  # a free slot is taken over, not copied, when at most this many cached positions are lost


@dataclass(slots=True, eq=False)
class Entry:
    """A request inside the engine. ``done`` is called once, with the generation or the error."""

    request: GenerationRequest
    done: Callable[[Generation | MillraceError], None]
    marks: list[tuple[int, int, bool]] = field(default_factory=list)  # (first position, version, mixed cache)
    slot: int = -1
    kept: list[KeptRow] = field(
        default_factory=list
    )  # of the first generated tokens: what is cut later, is cut at first


@dataclass(slots=True)
class Counters:
    """Since start. ``prefilled`` counts positions computed, ``reused`` positions taken from a cache or a sibling."""

    generated: int = 0
    prefilled: int = 0
    reused: int = 0
    steps: int = 0


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
        """``alone``: a request is computed by itself, from its first token, so that what it gets does not depend on what else
        the engine computes or has computed; needs a table of one slot."""
        if alone and table.num_slots != 1:
            raise ValueError(f"alone needs a table of one slot, not of {table.num_slots}")
        self._alone = alone
        self.decoder = decoder
        self.table = table
        self.version = version
        self.counters = Counters()
        self._kv_policy = kv_policy
        self._on_tokens = on_tokens
        self._waiting: deque[Entry] = deque()
        self._rows: list[Entry | None] = [None] * table.num_slots
        self._by_id: dict[str, Entry] = {}
        self._watched: dict[str, Entry] = {}  # of these, the requests that somebody watches

    # -- what the owner may ask between two steps --------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._by_id)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

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
        self.table.forget()

    def update(self, prepared: PreparedUpdate) -> float:
        """Write a prepared version; live rows go on under it. Returns the seconds that it took."""
        started = time.perf_counter()
        self.decoder.load(prepared)
        version = self.version = prepared.version
        table = self.table
        table.forget()
        live = np.flatnonzero(table.live)
        if self._kv_policy is KvPolicy.RECOMPUTE:
            table.cached[live] = 0
            self._compute_prefixes(live.tolist())
        else:
            table.mixed[live] = table.cached[live] > 0
        for slot in live.tolist():
            entry = self._rows[slot]
            assert entry is not None
            entry.marks.append((int(table.length[slot]), version, bool(table.mixed[slot])))
        if self.decoder.device.type == "cuda":
            torch.cuda.synchronize(self.decoder.device)  # the seconds are the device's, not those of handing it work
        seconds = time.perf_counter() - started
        log.info("engine.updated", version=version, live=len(live), kv=self._kv_policy.value, seconds=round(seconds, 4))
        return seconds

    # -- one step ---------------------------------------------------------------------------------------------

    def step(self) -> None:
        if self._waiting:
            self._admit()
        table = self.table
        sources, targets = plan_moves(table.live, table.length, self.counters.steps % SORT_EVERY == 0)
        if sources:
            self._move(sources, targets)
        num_rows = table.extent
        if not num_rows:
            return
        live = table.live[:num_rows].copy()
        tokens, positions = table.last_tokens(num_rows)
        buckets = [Bucket(*b) for b in bucket_bounds(np.where(live, table.length[:num_rows], 1))]
        device = self.decoder.device
        logits = self.decoder.decode(
            torch.from_numpy(tokens).to(device), torch.from_numpy(positions).to(device), buckets
        )
        drawn = sample(logits, table.sampling_rows(num_rows))
        broken = np.flatnonzero(live & ~np.isfinite(drawn.logprobs))
        for slot in broken.tolist():
            self._break(slot)
        for row, kept in drawn.kept.items():
            if (entry := self._rows[row]) is not None:
                entry.kept.append(kept)
        stopped, full = table.append(drawn.tokens, drawn.logprobs)
        self.counters.steps += 1
        num_emitted = int(live.sum()) - len(broken)
        self.counters.generated += num_emitted
        if self._on_tokens is not None:
            self._on_tokens(num_emitted, time.time())
        for slots, reason in ((stopped, FinishReason.STOP), (full, FinishReason.LENGTH)):
            for slot in slots.tolist():
                entry = self._rows[slot]
                assert entry is not None
                self._finish(entry, reason)
        # What ended for another reason above is not told its last token: the result has it.
        for entry in [entry for entry in self._watched.values() if entry.slot >= 0]:
            last = int(table.tokens[entry.slot, table.length[entry.slot] - 1])
            if entry.request.watch is not None and entry.request.watch(last):
                self._finish(entry, FinishReason.STOP)

    def _admit(self) -> None:
        table = self.table
        if self._alone:
            table.forget()  # a prefix that an earlier request left was rounded in other shapes
        batch: list[Entry] = []
        num_tokens = 0
        room = table.num_slots - table.num_live
        while self._waiting and len(batch) < room and num_tokens < ADMIT_TOKENS:
            entry = self._waiting.popleft()
            batch.append(entry)
            num_tokens += len(entry.request.prompt_ids)
        # Continued conversations first: their own slots must not become somebody else's in the same round.
        newcomers = [entry for entry in batch if not self._take_over(entry)]
        for entry in newcomers:
            self._take_free(entry)
        self._compute_prefixes([entry.slot for entry in batch])

    def _take_over(self, entry: Entry) -> bool:
        """Continue in the free slot whose whole cache is a prefix of the prompt, if there is one."""
        prompt = np.asarray(entry.request.prompt_ids, dtype=np.int32)
        source, shared = self.table.longest_prefix(prompt)
        if shared < MIN_SHARED or self.table.live[source] or self.table.cached[source] - shared > TAKEOVER_LOSS:
            return False
        self._place(entry, source, prompt, shared)
        return True

    def _take_free(self, entry: Entry) -> None:
        prompt = np.asarray(entry.request.prompt_ids, dtype=np.int32)
        source, shared = self.table.longest_prefix(prompt)
        slot = self.table.free_slot()
        assert slot is not None
        if shared < MIN_SHARED:
            shared = 0
        elif slot != source:
            self.decoder.cache.copy([source], [slot], shared)
        self._place(entry, slot, prompt, shared)

    def _place(self, entry: Entry, slot: int, prompt: Any, cached: int) -> None:
        request = entry.request
        seed = secrets.randbits(64) if request.seed is None else request.seed
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
        entry.marks.append((len(prompt), self.version, False))
        self.counters.reused += cached

    def _compute_prefixes(self, slots: list[int]) -> None:
        """Bring the KV of these slots up to all but their last token, computing what several share only once."""
        table = self.table
        rows = [table.tokens[slot, : table.length[slot] - 1] for slot in slots]
        followers = {
            slots[row]: (slots[leader], shared)
            for row, (leader, shared) in plan_sharing(rows).items()
            if shared > table.cached[slots[row]]
        }
        self._extend([slot for slot in slots if slot not in followers])
        by_leader: dict[tuple[int, int], list[int]] = {}
        for slot, source in followers.items():
            by_leader.setdefault(source, []).append(slot)
        for (leader, shared), members in by_leader.items():
            self.decoder.cache.copy([leader] * len(members), members, shared)
            self.counters.reused += int((shared - table.cached[members]).sum())
            table.cached[members] = shared
        self._extend(list(followers))

    def _extend(self, slots: list[int]) -> None:
        table = self.table
        spans = [Span(slot, int(table.cached[slot]), int(table.length[slot]) - 1) for slot in slots]
        device = self.decoder.device
        for batch in plan_passes([span for span in spans if span.num_tokens > 0]):
            tokens = np.zeros((len(batch), batch[0].num_tokens), dtype=np.int64)
            for row, span in enumerate(batch):
                tokens[row, : span.num_tokens] = table.tokens[span.slot, span.start : span.stop]
            self.decoder.extend(
                torch.tensor([span.slot for span in batch], device=device),
                torch.from_numpy(tokens).to(device),
                torch.tensor([span.start for span in batch], device=device),
                fresh=batch[0].start == 0,
            )
            for span in batch:
                table.cached[span.slot] = span.stop
                self.counters.prefilled += span.num_tokens

    def _move(self, sources: list[int], targets: list[int]) -> None:
        self.decoder.cache.copy(sources, targets, int(self.table.cached[sources].max()))
        self.table.moved(sources, targets)
        entries = [self._rows[slot] for slot in sources]
        for slot, entry in zip(targets, entries, strict=True):
            self._rows[slot] = entry
            if entry is not None:
                entry.slot = slot

    def _break(self, slot: int) -> None:
        """A row whose log-probability is not finite fails alone; its KV is wiped, for NaN would outlive the mask."""
        entry = self._rows[slot]
        assert entry is not None
        self._release(entry)
        self.table.cached[slot] = 0
        self.decoder.cache.clear([slot])
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
