"""Log-probability and entropy of target tokens from hidden states and the LM head, without full logits.

    z = hidden @ weight.T / temperature          in blocks of [chunk_tokens, chunk_vocab]
    logprob = z[target] - logsumexp(z)           of the temperature-scaled distribution, like the engines' numbers
    entropy = logsumexp(z) - sum(softmax(z) * z)

Where the sampler cut a token's distribution (``Drawn``), z is minus infinity outside the kept set: log-probability and
entropy belong to the renormalised distribution over this set, and tokens outside have no gradient.

The forward pass keeps two numbers per token (a running maximum and sum); the backward pass recomputes each block. So
the extra memory is one block for any vocabulary. Gradients flow to hidden states and head weight; with tied embeddings
autograd adds the head's share to the embedding's.

Blocks are computed in float32 at least (float64 for float64 inputs): a bfloat16 logit of 10 has an error of up to 0.03,
too much for a ratio of probabilities. On a GPU, bfloat16 hidden states and weights pass tensor cores, about ten times as
fast as float32 cores:

    logits     bfloat16 operands, float32 sums and result: a product of two bfloat16 numbers is exact in float32
    gradients  TF32, which rounds the float32 gradient of the logits to 10 bits (bfloat16: 7) and the other operand not

So the trainer scores a token that was sampled with top-k, top-p, min-p or ``min_new_tokens`` over the sampler's kept set,
not over the set that the trainer's own weights would keep. So the ratio of a policy to itself is 1, and importance
weights compare two distributions over one set.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from services.common.kept_tokens import KeptSets

Ints = npt.NDArray[np.int64]

CHUNK_TOKENS = 1024
CHUNK_VOCAB = 8192
_HIDDEN = -1e30  # instead of minus infinity, which gives NaN for a block without any kept token


@dataclass(frozen=True, slots=True, eq=False)
class Targets:
    """Pairs of a hidden state and the next token. A pair that occurs in several documents is scored once."""

    predecessors: torch.Tensor  # [num_distinct] rows of the packed row
    token_ids: torch.Tensor  # [num_distinct]
    copies: torch.Tensor | None = None  # [num_targets] in [0, num_distinct); None: each pair is one target

    @classmethod
    def of(cls, predecessors: Ints, token_ids: Ints, device: torch.device | str, *, distinct: bool) -> Targets:
        """Build the pairs. ``distinct``: score equal pairs once, which requires one sampling distribution."""
        copies = None
        if distinct and len(predecessors):
            pairs = predecessors * (int(token_ids.max()) + 1) + token_ids
            _, first, found = np.unique(pairs, return_index=True, return_inverse=True)
            if len(first) < len(pairs):
                predecessors, token_ids = predecessors[first], token_ids[first]
                copies = torch.as_tensor(found, device=device)
        return cls(torch.as_tensor(predecessors, device=device), torch.as_tensor(token_ids, device=device), copies)

    @classmethod
    def at(cls, positions: torch.Tensor, token_ids: torch.Tensor) -> Targets:
        """Targets at positions of a row without shared tokens; no position may be the first of its document."""
        return cls(positions - 1, token_ids.index_select(0, positions))

    def each(self, scores: torch.Tensor) -> torch.Tensor:
        """Expand scores of pairs to targets. [num_distinct] -> [num_targets]"""
        return scores if self.copies is None else scores.index_select(0, self.copies)


@dataclass(frozen=True, slots=True, eq=False)
class KeptBlocks:
    """Kept sets on the device, handed out in blocks of tokens and vocabulary."""

    left_out: torch.Tensor  # [num_tokens] bool, as in ``KeptSets``
    rows: torch.Tensor  # [num_pairs] int64, ascending
    ids: torch.Tensor  # [num_pairs] int64
    offsets: npt.NDArray[np.int64]  # [num_tokens + 1], on the host: pairs of token i are offsets[i]:offsets[i + 1]
    cut: npt.NDArray[np.bool_]  # [num_tokens], on the host: not drawn from the whole vocabulary
    sole: npt.NDArray[np.bool_]  # [num_tokens], on the host: no other token could be drawn

    @classmethod
    def on(cls, sets: KeptSets, device: torch.device) -> KeptBlocks | None:
        """None when every token was drawn from the whole vocabulary."""
        counts = np.bincount(sets.rows, minlength=sets.num_tokens)
        cut = ~sets.left_out | (counts > 0)
        if not cut.any():
            return None
        return cls(
            torch.as_tensor(sets.left_out, device=device),
            torch.as_tensor(sets.rows, device=device),
            torch.as_tensor(sets.ids, device=device),
            np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)]),
            cut,
            ~sets.left_out & (counts == 1),
        )

    def tokens(self, chosen: slice) -> KeptBlocks | None:
        """The sets of some consecutive tokens; None when none of them is cut."""
        start, stop = chosen.start, min(chosen.stop, len(self.cut))
        if not self.cut[start:stop].any():
            return None
        pairs = slice(int(self.offsets[start]), int(self.offsets[stop]))
        return KeptBlocks(
            self.left_out[start:stop],
            self.rows[pairs] - start,
            self.ids[pairs],
            self.offsets[start : stop + 1] - self.offsets[start],
            self.cut[start:stop],
            self.sole[start:stop],
        )

    def hidden(self, vocabulary: slice) -> torch.Tensor:
        """Tokens of a block of the vocabulary outside the kept sets. [num_tokens, block] bool"""
        width = vocabulary.stop - vocabulary.start
        # Ids outside the block go to an extra column: a selection of those inside would wait for the device.
        column = (self.ids - vocabulary.start).clamp(-1, width)
        column = torch.where(column < 0, width, column)
        hidden = (~self.left_out)[:, None].repeat(1, width + 1)
        hidden[self.rows, column] = self.left_out[self.rows]
        return hidden[:, :width]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drawn:
    """The sampling distributions of the targets of a micro-batch."""

    kept: KeptBlocks | None  # None: from the whole vocabulary
    temperatures: torch.Tensor | None  # [num_targets], NaN where it is the recipe's; None: everywhere

    @property
    def num_sole_choices(self) -> int:
        """Number of targets without an alternative in the kept set: their probability is 1, their gradient 0."""
        return 0 if self.kept is None else int(self.kept.sole.sum())


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float = 1.0,
    chunk_tokens: int = CHUNK_TOKENS,
    chunk_vocab: int = CHUNK_VOCAB,
    drawn: Drawn | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden [n, hidden], weight [vocab, hidden], targets [n] int64 -> logprobs [n], entropy [n].

    ``hidden[i]`` is the final hidden state at the position *before* target i. ``temperature`` holds for targets without
    a temperature in ``drawn``.
    """
    if temperature <= 0.0:
        raise ValueError(f"temperature must be above 0 for log-probabilities, got {temperature}")
    kept = None if drawn is None else drawn.kept
    temperatures = None  # [n, 1]; None: 1
    if temperature != 1.0 or (drawn is not None and drawn.temperatures is not None):
        temperatures = hidden.new_full((len(targets), 1), temperature, dtype=_compute_dtype(hidden.dtype))
        if drawn is not None and drawn.temperatures is not None:
            own = drawn.temperatures[:, None].to(temperatures.dtype)
            temperatures = torch.where(own.isnan(), temperatures, own)
    logprobs, entropy = _TokenLogprobs.apply(hidden, weight, targets, temperatures, kept, chunk_tokens, chunk_vocab)
    return logprobs, entropy


def _blocks(size: int, chunk: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk, size)) for start in range(0, size, chunk))


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _on_tensor_cores(hidden: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether products of the two lose nothing there."""
    return hidden.is_cuda and hidden.dtype == weight.dtype == torch.bfloat16


@contextmanager
def _tf32(enabled: bool) -> Iterator[None]:
    """Let float32 products of this process pass tensor cores meanwhile."""
    if not enabled:
        yield
        return
    setting = torch.backends.cuda.matmul
    before = setting.fp32_precision
    setting.fp32_precision = "tf32"
    try:
        yield
    finally:
        setting.fp32_precision = before


def _scaled_logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    block: slice,
    temperatures: torch.Tensor | None,
    kept: KeptBlocks | None,
) -> torch.Tensor:
    """Logits over the temperature, in the compute dtype. [tokens, hidden], [block, hidden] -> [tokens, block]"""
    dtype = _compute_dtype(hidden.dtype)
    if _on_tensor_cores(hidden, weight):
        logits = torch.mm(hidden, weight.T, out_dtype=dtype)
    else:
        logits = hidden.to(dtype) @ weight.to(dtype).T
    if temperatures is not None:
        logits.div_(temperatures)
    lowest = max(_HIDDEN, torch.finfo(logits.dtype).min)  # under autocast logits have 16 bits
    return logits if kept is None else logits.masked_fill_(kept.hidden(block), lowest)


def _forward_block(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperatures: torch.Tensor | None,
    kept: KeptBlocks | None,
    chunk_vocab: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(target logit, logsumexp, entropy) of some tokens by one pass over the vocabulary. [n] each"""
    num_tokens, vocab = len(targets), weight.shape[0]
    target_logit, total, weighted = hidden.new_zeros((3, num_tokens), dtype=_compute_dtype(hidden.dtype))
    maximum = torch.full_like(total, float("-inf"))
    # total: sum of exp(z - maximum); weighted: sum of exp(z - maximum) * (z - maximum)
    for block in _blocks(vocab, chunk_vocab):
        z = _scaled_logits(hidden, weight[block], block, temperatures, kept)
        inside = (targets >= block.start) & (targets < block.stop)
        local = (targets - block.start).clamp(0, block.stop - block.start - 1)
        target_logit = torch.where(inside, z.gather(1, local[:, None])[:, 0], target_logit)
        new_maximum = torch.maximum(maximum, z.amax(1))
        # Rescale the sums to the new maximum: exp(z - m') = exp(z - m) * exp(m - m').
        shift = maximum - new_maximum
        scale = shift.exp()
        weighted = (weighted + total * torch.where(total > 0, shift, torch.zeros_like(shift))) * scale
        total = total * scale
        z -= new_maximum[:, None]
        p = z.exp()
        total = total + p.sum(1)
        weighted = weighted + p.mul_(z).sum(1)
        maximum = new_maximum
    log_total = total.log()
    return target_logit, maximum + log_total, log_total - weighted / total


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperatures: torch.Tensor | None,
        kept: KeptBlocks | None,
        chunk_tokens: int,
        chunk_vocab: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype, fast = _compute_dtype(hidden.dtype), _on_tensor_cores(hidden, weight)
        logprobs, logsumexp, entropy = (hidden.new_empty(len(targets), dtype=dtype) for _ in range(3))
        for rows in _blocks(len(targets), chunk_tokens):
            target_logit, log_z, block_entropy = _forward_block(
                hidden[rows] if fast else hidden[rows].to(dtype),
                weight,
                targets[rows],
                None if temperatures is None else temperatures[rows],
                None if kept is None else kept.tokens(rows),
                chunk_vocab,
            )
            logprobs[rows] = target_logit - log_z
            logsumexp[rows] = log_z
            entropy[rows] = block_entropy
        ctx.save_for_backward(hidden, weight, targets, logsumexp, entropy)
        ctx.settings = (temperatures, kept, chunk_tokens, chunk_vocab)
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """With q = softmax(z): d logprob / dz = onehot - q, and d entropy / dz = -q (log q + entropy)."""
        grad_logprobs, grad_entropy = grads
        hidden, weight, targets, logsumexp, entropy = ctx.saved_tensors
        temperatures, kept, chunk_tokens, chunk_vocab = ctx.settings
        dtype, fast = logsumexp.dtype, _on_tensor_cores(hidden, weight)
        grad_hidden = torch.zeros_like(hidden, dtype=dtype)
        is_frozen = not ctx.needs_input_grad[1]  # below an adapter: no gradient of the size of the head
        grad_weight = None if is_frozen else torch.zeros_like(weight, dtype=dtype)
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(logsumexp)
        for rows in _blocks(len(targets), chunk_tokens):
            h = hidden[rows].to(dtype)  # once for all blocks
            upstream = grad_logprobs[rows, None]
            own_temperatures = None if temperatures is None else temperatures[rows]
            own_kept = None if kept is None else kept.tokens(rows)
            for block in _blocks(weight.shape[0], chunk_vocab):
                w = weight[block].to(dtype)
                operands = (hidden[rows], weight[block]) if fast else (h, w)
                log_q = _scaled_logits(*operands, block, own_temperatures, own_kept).sub_(logsumexp[rows, None])
                q = log_q.exp()
                if grad_entropy is None:
                    grad_z = q.mul_(-upstream)
                else:
                    grad_z = q.mul_(-upstream - grad_entropy[rows, None] * log_q.add_(entropy[rows, None]))
                inside = (targets[rows] >= block.start) & (targets[rows] < block.stop)
                local = (targets[rows] - block.start).clamp(0, block.stop - block.start - 1)
                grad_z.scatter_add_(
                    1, local[:, None], torch.where(inside[:, None], upstream, torch.zeros_like(upstream))
                )
                if own_temperatures is not None:
                    grad_z.div_(own_temperatures)
                with _tf32(fast):
                    grad_hidden[rows].addmm_(grad_z, w)
                    if grad_weight is not None:
                        grad_weight[block].addmm_(grad_z.T, h)
        of_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden.to(hidden.dtype), of_weight, None, None, None, None, None
