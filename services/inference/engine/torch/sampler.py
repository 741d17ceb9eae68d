"""Draws one token per row from logits, with the log-probability under the sampling distribution.

Order: stop tokens suppressed while ``min_new_tokens`` is not reached, temperature, top-k, top-p, min-p (as transformers
does), then renormalisation over the kept tokens. Temperature 0 takes the argmax and reports the log-softmax at
temperature 1 there; top-k, top-p and min-p do not apply there. Recorded rows also have the kept tokens, so that the
trainer can take its log-probabilities over the same set.

A row may force its token instead of drawing it. Its log-probability is that of the same distribution when the token
is among those kept; otherwise the token is kept beside them, and the distribution renormalised over both.

Randomness is a hash of (seed of the request, index of the token), not a generator with state: a request draws
the same uniform numbers under any other load. The sampled tokens are then the same too, unless another batch
shape rounds the logits differently within about 1e-6 of the boundary between two tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from services.common.records.kept_tokens import KeptRow, kept_rows, left_out_row

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
