"""What each KV slot holds: tokens, log-probabilities, how much of its KV is valid, and how its request samples.

Numpy columns indexed by slot, so that a decoding step reads them without a loop. A slot that is free keeps its
tokens and KV as a cache until it is needed: the next turn of a conversation finds its prefix there.

Invariant: the first ``cached[s]`` positions of slot s in the KV cache were computed from ``tokens[s]`` by the
current weights (or, under ``KvPolicy.KEEP``, by older ones for a live slot with ``mixed[s]``; those are never reused).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from services.common.types import Sampling
from services.inference.engine.sampler import SamplingRows, uniform_noise

MIN_SHARED = 16  # positions; below this a copy costs more than computing them again


class SlotTable:
    """Columns over slots. Slots are physical places: rows move (``moved``) to keep the live ones in front."""

    def __init__(self, num_slots: int, context_length: int) -> None:
        self.num_slots = num_slots
        self.context_length = context_length
        self.tokens = np.zeros((num_slots, context_length), dtype=np.int32)
        self.logprobs = np.zeros((num_slots, context_length), dtype=np.float32)
        self.length = np.zeros(num_slots, dtype=np.int64)
        self.cached = np.zeros(num_slots, dtype=np.int64)
        self.live = np.zeros(num_slots, dtype=np.bool_)
        self.mixed = np.zeros(num_slots, dtype=np.bool_)
        self._last_used = np.zeros(num_slots, dtype=np.int64)
        self._min_length = np.zeros(num_slots, dtype=np.int64)
        self.max_length = np.zeros(num_slots, dtype=np.int64)
        self._prompt_length = np.zeros(num_slots, dtype=np.int64)
        self._temperature = np.ones(num_slots, dtype=np.float32)
        self._top_p = np.ones(num_slots, dtype=np.float32)
        self._top_k = np.zeros(num_slots, dtype=np.int64)
        self._min_p = np.zeros(num_slots, dtype=np.float32)
        self._record = np.zeros(num_slots, dtype=np.bool_)
        self._seed = np.zeros(num_slots, dtype=np.uint64)
        self._stop_ids = np.full((num_slots, 1), -1, dtype=np.int64)
        # [num_slots, context_length] tokens to say at the positions where they will stand, -1 where one is drawn; made
        # when the first request forces any.
        self._forced: npt.NDArray[np.int32] | None = None
        self._clock = 0

    # -- choosing -------------------------------------------------------------------------------------------

    def longest_prefix(self, prompt: npt.NDArray[np.int32]) -> tuple[int, int]:
        """The slot, live or free, with the longest valid KV for a proper prefix of ``prompt``, and that length."""
        usable = np.where(self.mixed, 0, np.minimum(self.cached, len(prompt) - 1))
        candidates = np.flatnonzero(usable)
        if not len(candidates):
            return -1, 0
        same = self.tokens[candidates, : int(usable.max())] == prompt[: int(usable.max())]
        agreed = np.where(same.all(axis=1), same.shape[1], same.argmin(axis=1))
        shared = np.minimum(agreed, usable[candidates])
        # Among equals prefer the slot with the least else in it: taking it over loses nothing.
        best = np.lexsort((self.cached[candidates], -shared))[0]
        return int(candidates[best]), int(shared[best])

    def free_slot(self) -> int | None:
        """An empty slot, lowest first; else the free one unused for longest; None when all are live."""
        free = np.flatnonzero(~self.live)
        if not len(free):
            return None
        empty = free[self.cached[free] == 0]
        return int(empty[0]) if len(empty) else int(free[self._last_used[free].argmin()])

    @property
    def num_live(self) -> int:
        return int(self.live.sum())

    @property
    def extent(self) -> int:
        """One more than the highest live slot."""
        live = np.flatnonzero(self.live)
        return int(live[-1]) + 1 if len(live) else 0

    # -- the life of a row ----------------------------------------------------------------------------------

    def occupy(
        self,
        slot: int,
        prompt: npt.NDArray[np.int32],
        cached: int,
        sampling: Sampling,
        stops: tuple[int, ...],
        seed: int,
        forced: tuple[int, ...] | None = None,
        record: bool = True,
    ) -> None:
        num_prompt = len(prompt)
        self._clock += 1
        self.tokens[slot, :num_prompt] = prompt
        self.length[slot] = num_prompt
        self.cached[slot] = cached
        self.live[slot] = True
        self.mixed[slot] = False
        self._last_used[slot] = self._clock
        self._prompt_length[slot] = num_prompt
        self._min_length[slot] = num_prompt + sampling.min_new_tokens
        self.max_length[slot] = min(num_prompt + sampling.max_new_tokens, self.context_length)
        self._temperature[slot] = sampling.temperature
        self._top_p[slot] = sampling.top_p
        self._top_k[slot] = sampling.top_k
        self._min_p[slot] = sampling.min_p
        self._record[slot] = record
        self._seed[slot] = np.uint64(seed & 0xFFFF_FFFF_FFFF_FFFF)
        if len(stops) > self._stop_ids.shape[1]:
            wider = np.full((self.num_slots, len(stops)), -1, dtype=np.int64)
            wider[:, : self._stop_ids.shape[1]] = self._stop_ids
            self._stop_ids = wider
        self._stop_ids[slot] = -1
        self._stop_ids[slot, : len(stops)] = stops
        if forced is not None and self._forced is None:
            self._forced = np.full((self.num_slots, self.context_length), -1, dtype=np.int32)
        if self._forced is not None:
            self._forced[slot] = -1
        if forced is not None and self._forced is not None:
            end = self.max_length[slot] = min(int(self.max_length[slot]), num_prompt + len(forced))
            self._forced[slot, num_prompt:end] = forced[: end - num_prompt]

    def release(self, slot: int) -> None:
        """The request is over; what the slot holds stays as a cache, unless older weights computed part of it."""
        self._clock += 1
        self._last_used[slot] = self._clock
        self.live[slot] = False
        if self.mixed[slot]:
            self.cached[slot] = 0
        self.mixed[slot] = False

    def forget(self) -> None:
        """No free slot is a cache any more."""
        self.cached[~self.live] = 0

    def moved(self, sources: list[int], targets: list[int]) -> None:
        """Rows ``sources`` are now at ``targets``; the two are permutations of each other."""
        for column in (
            *(() if self._forced is None else (self._forced,)),
            *(self.tokens, self.logprobs, self.length, self.cached, self.live, self.mixed, self._last_used),
            *(self._min_length, self.max_length, self._prompt_length, self._temperature, self._top_p, self._top_k),
            *(self._seed, self._stop_ids, self._min_p, self._record),
        ):
            column[targets] = column[sources]

    # -- a decoding step over slots 0…num_rows-1 -------------------------------------------------------------

    def last_tokens(self, num_rows: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Token and position to feed per row. A free row repeats what lies there, behind its valid KV."""
        positions = np.maximum(self.length[:num_rows] - 1, 0)
        return self.tokens[np.arange(num_rows), positions].astype(np.int64), positions

    def sampling_rows(self, num_rows: int) -> SamplingRows:
        live = self.live[:num_rows]
        length = self.length[:num_rows]
        return SamplingRows(
            temperature=np.where(live, self._temperature[:num_rows], np.float32(1)),
            top_p=np.where(live, self._top_p[:num_rows], np.float32(1)),
            top_k=np.where(live, self._top_k[:num_rows], 0),
            min_p=np.where(live, self._min_p[:num_rows], np.float32(0)),
            suppress_stop=live & (length < self._min_length[:num_rows]),
            stop_ids=self._stop_ids[:num_rows],
            uniform=uniform_noise(self._seed[:num_rows], length - self._prompt_length[:num_rows]),
            record=live & self._record[:num_rows],
            forced=self._forced_next(live, length),
        )

    def _forced_next(self, live: npt.NDArray[np.bool_], length: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
        if self._forced is None:
            return None
        # A free row may be full; a live one always has room for its next token.
        place = np.minimum(length, self.context_length - 1)
        return np.where(live, self._forced[np.arange(len(live)), place], -1).astype(np.int64)

    def append(
        self, tokens: npt.NDArray[np.int64], logprobs: npt.NDArray[np.float32]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Add one token to each live row; returns the rows that end by a stop token, and those out of length."""
        num_rows = len(tokens)
        rows = np.flatnonzero(self.live[:num_rows])
        at = self.length[rows]
        self.tokens[rows, at] = tokens[rows]
        self.logprobs[rows, at] = logprobs[rows]
        self.cached[rows] = at
        self.length[rows] = at + 1
        stopped = (self._stop_ids[rows] == tokens[rows, None]).any(axis=1)
        full = at + 1 >= self.max_length[rows]
        return rows[stopped], rows[full & ~stopped]
