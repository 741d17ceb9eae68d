"""Log-probability and entropy of target tokens from hidden states and the LM head, never with full logits.

    z = hidden @ weight.T / temperature          in blocks of [chunk_tokens, chunk_vocab]
    logprob = z[target] - logsumexp(z)           of the temperature-scaled distribution, like the engines' numbers
    entropy = logsumexp(z) - sum(softmax(z) * z)

Where the sampler cut a token's distribution (``drawn``), z is minus infinity outside the set that it kept: log-probability
and entropy are of what is left, renormalised, and nothing outside has a gradient.

The forward pass keeps two numbers per token (a running maximum and sum); the backward pass recomputes each block. So
the extra memory is one block, whatever the vocabulary. Gradients flow to hidden states and head weight; with tied
embeddings autograd adds the head's share to the embedding's.

Blocks are computed in float32 at least (float64 for float64 inputs): a bfloat16 logit of 10 is off by up to 0.03,
which a ratio of probabilities cannot bear.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from services.trainer.drawn import Drawn, KeptBlocks

CHUNK_TOKENS = 1024
CHUNK_VOCAB = 8192
_HIDDEN = -1e30  # in place of minus infinity, which would make NaN of a block that a token keeps nothing of


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

    ``hidden[i]`` is the final hidden state at the position *before* target i. ``temperature`` holds for targets of which
    ``drawn`` names no other.
    """
    if temperature <= 0.0:
        raise ValueError(f"temperature must be above 0 to have log-probabilities, got {temperature}")
    temperatures: float | torch.Tensor = temperature
    kept = None
    if drawn is not None:
        kept = drawn.kept
        if drawn.temperatures is not None:
            own = drawn.temperatures
            temperatures = torch.where(own.isnan(), torch.full_like(own, temperature), own)
    logprobs, entropy = _TokenLogprobs.apply(hidden, weight, targets, temperatures, kept, chunk_tokens, chunk_vocab)
    return logprobs, entropy


def _blocks(size: int, chunk: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk, size)) for start in range(0, size, chunk))


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _at(temperatures: float | torch.Tensor, rows: slice) -> float | torch.Tensor:
    """Of some tokens: one for all, or [tokens, 1]."""
    return temperatures[rows, None] if isinstance(temperatures, torch.Tensor) else temperatures


def _divided(logits: torch.Tensor, temperature: float | torch.Tensor) -> torch.Tensor:
    """In place."""
    return logits if isinstance(temperature, float) and temperature == 1.0 else logits.div_(temperature)


def _scaled_logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    block: slice,
    temperature: float | torch.Tensor,
    kept: KeptBlocks | None,
) -> torch.Tensor:
    """[tokens, hidden], [block, hidden] -> [tokens, block] in the compute dtype. ``weight`` is that of the block."""
    logits = _divided(hidden @ weight.to(hidden.dtype).T, temperature)
    return logits if kept is None else logits.masked_fill_(kept.hidden(block), _HIDDEN)


def _forward_block(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float | torch.Tensor,
    kept: KeptBlocks | None,
    chunk_vocab: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(target logit, logsumexp, entropy) of some tokens by one pass over the vocabulary. [n] each"""
    num_tokens, vocab = len(targets), weight.shape[0]
    maximum = hidden.new_full((num_tokens,), float("-inf"))
    total = hidden.new_zeros(num_tokens)  # sum of exp(z - maximum)
    weighted = hidden.new_zeros(num_tokens)  # sum of exp(z - maximum) * (z - maximum)
    target_logit = hidden.new_zeros(num_tokens)
    for block in _blocks(vocab, chunk_vocab):
        z = _scaled_logits(hidden, weight[block], block, temperature, kept)
        inside = (targets >= block.start) & (targets < block.stop)
        local = (targets - block.start).clamp(0, block.stop - block.start - 1)
        target_logit = torch.where(inside, z.gather(1, local[:, None])[:, 0], target_logit)
        new_maximum = torch.maximum(maximum, z.amax(1))
        # Move what is summed so far to the new maximum: exp(z - m') = exp(z - m) * exp(m - m').
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
        temperatures: float | torch.Tensor,
        kept: KeptBlocks | None,
        chunk_tokens: int,
        chunk_vocab: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = _compute_dtype(hidden.dtype)
        logprobs, logsumexp, entropy = (hidden.new_empty(len(targets), dtype=dtype) for _ in range(3))
        for rows in _blocks(len(targets), chunk_tokens):
            target_logit, log_z, block_entropy = _forward_block(
                hidden[rows].to(dtype),
                weight,
                targets[rows],
                _at(temperatures, rows),
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
        dtype = logsumexp.dtype
        grad_hidden = torch.zeros_like(hidden, dtype=dtype)
        grad_weight = torch.zeros_like(weight, dtype=dtype)
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(logsumexp)
        for rows in _blocks(len(targets), chunk_tokens):
            h = hidden[rows].to(dtype)
            upstream = grad_logprobs[rows, None]
            temperature, own_kept = _at(temperatures, rows), None if kept is None else kept.tokens(rows)
            for block in _blocks(weight.shape[0], chunk_vocab):
                w = weight[block].to(dtype)
                log_q = _scaled_logits(h, w, block, temperature, own_kept).sub_(logsumexp[rows, None])
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
                _divided(grad_z, temperature)
                grad_hidden[rows].addmm_(grad_z, w)
                grad_weight[block].addmm_(grad_z.T, h)
        return grad_hidden.to(hidden.dtype), grad_weight.to(weight.dtype), None, None, None, None, None
