"""The table of slots: tokens, log-probabilities, the valid length of the KV, and the sampling of the request.

Numpy columns indexed by slot, so that a decoding step reads them without a loop. A free slot keeps its tokens and KV as a
cache until another request takes the slot: the next turn of a conversation finds its prefix there.

Invariant: the first ``cached[s]`` positions of slot s in the KV cache were computed from ``tokens[s]`` by the
current weights (or, under ``KvPolicy.KEEP``, by older ones for a live slot with ``mixed[s]``; those are never reused).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from services.common.kept_tokens import KeptRow, kept_rows, left_out_row
from services.common.records import Sampling
from services.inference.engine.torch.kv import Ints

# --- Draws one token per row from logits, with the log-probability under the sampling distribution.


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRows:
    """Sampling parameters of the rows of one decoding step. All arrays are [num_rows] but ``stop_ids``."""

    temperature: npt.NDArray[np.float32]
    top_p: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int64]
    min_p: npt.NDArray[np.float32]
    suppress_stop: npt.NDArray[np.bool_]
    stop_ids: npt.NDArray[np.int64]  # [num_rows, most stop tokens], padded with -1
    uniform: npt.NDArray[np.float64]  # in [0, 1)
    record: npt.NDArray[np.bool_]  # say which tokens could be drawn
    forced: npt.NDArray[np.int64] | None = None  # the token to take, -1 where one is drawn; None when all are drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """One decoding step's tokens. ``kept``: by row, which tokens could be drawn, of the recorded rows that are cut."""

    tokens: npt.NDArray[np.int64]  # [num_rows]
    logprobs: npt.NDArray[np.float32]  # [num_rows]
    kept: Mapping[int, KeptRow]


def uniform_noise(seed: npt.NDArray[np.uint64], index: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per row, a pure function of (seed, index): splitmix64 at stream position ``index``."""
    with np.errstate(over="ignore"):
        x = _mix(seed + _GOLDEN)  # neighbouring seeds must not give shifted copies of one stream
        x = _mix(x + (index.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    # 48 bits: u * total then stays below total in float64 with every rounding, so a token always exists.
    return (x >> np.uint64(16)).astype(np.float64) * 2.0**-48


def sample_plain(logits: torch.Tensor, uniform: npt.NDArray[np.float64]) -> Drawn:
    """The same as ``sample`` of rows that all draw at temperature 1 from the whole vocabulary; ``logits`` is overwritten."""
    logits = logits.float()
    token, top, total = _draw(logits, uniform)
    logprob = (logits.gather(1, token) - top).double() - total.log()
    return Drawn(tokens=token[:, 0].cpu().numpy(), logprobs=logprob[:, 0].float().cpu().numpy(), kept={})


def sample(logits: torch.Tensor, rows: SamplingRows) -> Drawn:
    """Token and log-probability per row. ``logits`` [num_rows, vocabulary] is overwritten.

    A row whose logits are not finite gets a log-probability that is not finite either.
    """
    logits = logits.float()
    device = logits.device
    if rows.suppress_stop.any():
        row, column = np.nonzero(rows.suppress_stop[:, None] & (rows.stop_ids >= 0))
        ids = rows.stop_ids[row, column]
        logits[torch.from_numpy(row).to(device), torch.from_numpy(ids).to(device)] = -torch.inf
    greedy = rows.temperature == 0
    if (rows.temperature != 1).any():
        divisor = np.where(greedy, np.float32(1), rows.temperature)
        logits /= torch.from_numpy(divisor).to(device)[:, None]
    forced = None if rows.forced is None else torch.from_numpy(rows.forced).to(device)[:, None]
    wanted = None if forced is None else logits.gather(1, forced.clamp(min=0))
    filtered = ((rows.top_p < 1) | (rows.top_k > 0) | (rows.min_p > 0)) & ~greedy
    cut: tuple[torch.Tensor, torch.Tensor] | None = (
        None  # logits and ids by descending logit, [filtered rows, vocabulary]
    )
    if filtered.any():
        which = torch.from_numpy(np.flatnonzero(filtered)).to(device)
        cut = _keep_top(logits[which], rows, filtered)
        logits[which] = torch.full_like(cut[0], -torch.inf).scatter_(1, cut[1], cut[0])
    if forced is not None and wanted is not None:
        place = forced.clamp(min=0)
        logits.scatter_(1, place, torch.where(forced >= 0, wanted, logits.gather(1, place)))
    token, top, total = _draw(logits, rows.uniform)
    if greedy.any():
        token = torch.where(torch.from_numpy(greedy).to(device)[:, None], logits.argmax(dim=-1, keepdim=True), token)
    if forced is not None:
        token = torch.where(forced >= 0, forced, token)
    logprob = (logits.gather(1, token) - top).double() - total.log()
    tokens = token[:, 0].cpu().numpy()
    kept: dict[int, KeptRow] = {}
    if (recorded := rows.record & ~greedy).any():
        if cut is not None and (recorded & filtered).any():
            kept |= _kept_of_filtered(*cut, tokens, np.flatnonzero(filtered), recorded)
        kept |= {
            row: left_out_row(rows.stop_ids[row][rows.stop_ids[row] >= 0].tolist())
            for row in np.flatnonzero(recorded & rows.suppress_stop & ~filtered).tolist()
        }
    return Drawn(tokens=tokens, logprobs=logprob[:, 0].float().cpu().numpy(), kept=kept)


def _draw(logits: torch.Tensor, uniform: npt.NDArray[np.float64]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A token per row, the row's greatest logit, and its sum of exp(logit - greatest); all [num_rows, 1].

    ``logits`` is [num_rows, vocabulary].
    """
    top = logits.amax(dim=-1, keepdim=True)
    # Inverse CDF in float64: one uniform number per token instead of one per vocabulary entry, and exact in the tail.
    cdf = torch.cumsum((logits - top).exp_(), dim=-1, dtype=torch.float64)  # [num_rows, vocabulary]
    total = cdf[:, -1:]
    target = torch.from_numpy(uniform).to(logits.device)[:, None] * total
    return torch.searchsorted(cdf, target, right=True).clamp_(max=logits.shape[1] - 1), top, total


def _keep_top(
    logits: torch.Tensor, rows: SamplingRows, filtered: npt.NDArray[np.bool_]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and ids by descending logit; logits outside the top-k, the nucleus of the rest or min-p are minus infinity."""
    device = logits.device
    vocab_size = logits.shape[1]
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    k = torch.from_numpy(np.where(rows.top_k > 0, rows.top_k, vocab_size)[filtered]).to(device)[:, None]
    ordered = ordered.masked_fill(torch.arange(vocab_size, device=device)[None, :] >= k, -torch.inf)
    probability = ordered.softmax(dim=-1)
    # The token that carries the mass over top_p still belongs to the nucleus; the first one always does.
    before = probability.cumsum(dim=-1) - probability
    outside = before >= torch.from_numpy(rows.top_p[filtered]).to(device)[:, None]
    outside |= probability < torch.from_numpy(rows.min_p[filtered]).to(device)[:, None] * probability[:, :1]
    outside[:, 0] = False
    return ordered.masked_fill(outside, -torch.inf), order


def _kept_of_filtered(
    ordered: torch.Tensor,
    order: torch.Tensor,
    tokens: npt.NDArray[np.int64],
    rows: npt.NDArray[np.int64],
    recorded: npt.NDArray[np.bool_],
) -> dict[int, KeptRow]:
    """By row, which tokens could be drawn. ``ordered`` and ``order`` [len(rows), vocabulary] are of ``rows``."""
    at = torch.from_numpy(np.flatnonzero(recorded[rows])).to(order.device)
    counts = (ordered[at] > -torch.inf).sum(dim=-1).cpu().numpy()
    ids = order[at, : int(counts.max())].cpu().numpy()
    chosen = rows[recorded[rows]]
    return dict(zip(chosen.tolist(), kept_rows(ids, counts, tokens[chosen], ordered.shape[1]), strict=True))


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


MIN_SHARED = 16  # positions from which a common prefix pays for its copy
# The same if the prefix is half of the row, whose rest is computed apart from rows without a common prefix.
MIN_SHARED_HALF = 4
JOIN_SHARE = 4  # requests join once they are one of so many of the rows that decode
JOIN_STEPS = 3  # or after so many decoding steps
LINGER_S = 0.05  # a step is held at most this long
MEMORY_S = 1.0  # rows that decoded longer ago do not predict the next requests


def worth_sharing(num_shared: int, num_tokens: int) -> bool:
    """Whether a row of so many tokens takes ``num_shared`` positions from another one instead of computing them."""
    return num_shared >= MIN_SHARED or num_shared >= max(MIN_SHARED_HALF, num_tokens / 2)


class SlotTable:
    """Columns over slots."""

    def __init__(self, num_slots: int, context_length: int) -> None:
        self.num_slots = num_slots
        self.context_length = context_length
        self.tokens = np.zeros((num_slots, context_length), dtype=np.int32)
        self.logprobs = np.zeros((num_slots, context_length), dtype=np.float32)
        self.length = np.zeros(num_slots, dtype=np.int64)
        self.cached = np.zeros(num_slots, dtype=np.int64)
        self.live = np.zeros(num_slots, dtype=np.bool_)
        self.mixed = np.zeros(num_slots, dtype=np.bool_)
        self.last_used = np.zeros(num_slots, dtype=np.int64)
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
        # Live rows whose sampling needs more than a draw at temperature 1 from the whole vocabulary.
        self._shaped = np.zeros(num_slots, dtype=np.bool_)

    # -- choosing -------------------------------------------------------------------------------------------

    def longest_prefix(self, prompt: npt.NDArray[np.int32]) -> tuple[int, int]:
        """The slot, live or free, with the longest valid KV for a proper prefix of ``prompt``, and that length."""
        usable = np.where(self.mixed, 0, np.minimum(self.cached, len(prompt) - 1))
        candidates = usable.nonzero()[0]
        if not len(candidates):
            return -1, 0
        width = int(usable.max())
        same = self.tokens[candidates, :width] == prompt[:width]
        agreed = np.where(same.all(axis=1), same.shape[1], same.argmin(axis=1))
        shared = np.minimum(agreed, usable[candidates])
        # Among equals prefer the slot with the fewest other tokens: taking that slot loses the least.
        best = (shared * (self.context_length + 1) - self.cached[candidates]).argmax()
        return int(candidates[best]), int(shared[best])

    def free_slot(self) -> int | None:
        """The free slot without a cache, or else with the oldest cache; of equals the lowest. None without a free slot."""
        free = (~self.live).nonzero()[0]
        worth = np.where(self.cached[free] > 0, self.last_used[free], -1)
        return int(free[worth.argmin()]) if len(free) else None

    @property
    def num_live(self) -> int:
        return int(np.count_nonzero(self.live))

    @property
    def num_free(self) -> int:
        return self.num_slots - self.num_live

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
        self.last_used[slot] = self._clock
        self._prompt_length[slot] = num_prompt
        self._min_length[slot] = num_prompt + sampling.min_new_tokens
        self.max_length[slot] = min(num_prompt + sampling.max_new_tokens, self.context_length)
        self._temperature[slot] = sampling.temperature
        self._top_p[slot] = sampling.top_p
        self._top_k[slot] = sampling.top_k
        self._min_p[slot] = sampling.min_p
        self._record[slot] = record
        plain = (sampling.temperature, sampling.top_p, sampling.min_p) == (1, 1, 0) and sampling.top_k <= 0
        self._shaped[slot] = not plain or sampling.min_new_tokens > 0 or forced is not None
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
        """Free the slot of an ended request; its tokens stay as a cache, unless older weights computed part of them."""
        self._clock += 1
        self.last_used[slot] = self._clock
        self.live[slot] = False
        self._shaped[slot] = False
        if self.mixed[slot]:
            self.cached[slot] = 0
        self.mixed[slot] = False

    # -- a decoding step over some slots ---------------------------------------------------------------------

    def last_tokens(self, slots: Ints) -> tuple[Ints, Ints]:
        """Token and position to feed per live slot."""
        positions = self.length[slots] - 1
        return self.tokens[slots, positions].astype(np.int64), positions

    @property
    def is_plain(self) -> bool:
        """Whether every live row draws at temperature 1 from the whole vocabulary."""
        return not self._shaped.any()

    def uniform(self, slots: Ints) -> npt.NDArray[np.float64]:
        """The numbers that the slots draw their next token with."""
        return uniform_noise(self._seed[slots], self.length[slots] - self._prompt_length[slots])

    def sampling_rows(self, slots: Ints) -> SamplingRows:
        length = self.length[slots]
        return SamplingRows(
            temperature=self._temperature[slots],
            top_p=self._top_p[slots],
            top_k=self._top_k[slots],
            min_p=self._min_p[slots],
            suppress_stop=length < self._min_length[slots],
            stop_ids=self._stop_ids[slots],
            uniform=self.uniform(slots),
            record=self._record[slots],
            forced=None if self._forced is None else self._forced[slots, length].astype(np.int64),
        )

    def append(self, slots: Ints, tokens: Ints, logprobs: npt.NDArray[np.float32]) -> tuple[Ints, Ints]:
        """Add one token to each live one of ``slots``; returns those that end by a stop token, and those out of length."""
        live = self.live[slots]
        rows, tokens = slots[live], tokens[live]
        at = self.length[rows]
        self.tokens[rows, at] = tokens
        self.logprobs[rows, at] = logprobs[live]
        self.cached[rows] = at
        self.length[rows] = at + 1
        stopped = (self._stop_ids[rows] == tokens[:, None]).any(axis=1)
        full = at + 1 >= self.max_length[rows]
        return rows[stopped], rows[full & ~stopped]


class Gathering:
    """Decides when the next decoding step is due and when waiting requests join. Times are seconds of one monotonic clock.

    A step over few rows costs nearly as much as one over many, so steps may wait. A step is held while fewer rows (decoding
    or waiting to join) exist than half of the recent maximum, until enough requests have come, or for at most the decoding
    time since the last hold and at most LINGER_S. After a hold without new requests, the awaited number is halved. So
    requests that return together, as from tool calls, go on together; a waiting request loses at most its decoding time; and
    a lone caller is not held.

    While rows decode, requests join once there are a quarter as many as rows, or after JOIN_STEPS steps: a pass over the
    prompts of several costs little more than one over a single prompt.
    """

    def __init__(self) -> None:
        self._waited_steps = 0
        self._held_since: float | None = None
        self._wanted = 0  # rows that the next step waits for
        self._credit_s = 0.0  # time left for holding
        self._last = 0.0  # when the last step ended

    def holds_s(self, num_waiting: int, num_live: int, now: float) -> float:
        """Seconds that the next step is still held; 0 when the step is due."""
        rows = num_waiting + num_live
        if self._held_since is None and now - self._last > MEMORY_S:
            self._wanted = 0
        self._wanted = max(self._wanted, rows // 2)
        if rows < self._wanted:
            if self._held_since is None:
                self._held_since = now
            left = self._held_since + self._credit_s - now
            if left > 0:
                return left
            self._wanted = rows // 2
        if self._held_since is not None:
            self._held_since = None
            self._credit_s = 0.0
            self._waited_steps = JOIN_STEPS
        return 0.0

    def joins(self, num_waiting: int, num_live: int, room: int) -> bool:
        """Whether the waiting requests take slots now. Called once before every decoding step."""
        if not num_waiting or not room:
            self._waited_steps = 0
            return False
        if min(num_waiting, room) * JOIN_SHARE >= num_live or self._waited_steps >= JOIN_STEPS:
            self._waited_steps = 0
            return True
        self._waited_steps += 1
        return False

    def decoded(self, began: float, now: float) -> None:
        """A step took from ``began`` to ``now``."""
        self._credit_s = min(LINGER_S, self._credit_s + now - began)
        self._last = now
