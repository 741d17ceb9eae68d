"""The model being trained: a Hugging Face causal LM that returns log-probabilities of chosen tokens instead of logits.

Independent of losses, optimizers and batches. Attention runs over packed documents (``attention``), the head in blocks
(``logprobs``). The model is always in evaluation mode, so that dropout, jitter and all other noise are off: the ratio of the
policy to itself must be 1. ``self_test`` compares each model with its own forward pass at load.

On the CPU, plain RMSNorms get a hand-written backward pass. transformers' RMSNorm is half a dozen elementwise operations
forwards and twice as many backwards, each with one pass over memory: a seventh of a training step of a small model. The
version here gives the same bits forwards and saves half of the passes backwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, Self

import structlog
import torch
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from services.common.errors import ModelMismatchError
from services.common.lora import adapter_weights, attach
from services.common.text.huggingface import load_model, named_weights
from services.common.weights.snapshot import AdapterIdentity
from services.trainer.model.adapter import AdapterSetup, Base, reset_adapter
from services.trainer.model.attention import Documents, Kernel, register_attention
from services.trainer.model.logprobs import CHUNK_TOKENS, Drawn, Targets, token_logprobs
from services.trainer.model.self_test import Limit, check_architecture, check_loaded
from services.trainer.model.sharded_load import open_by_shards
from services.trainer.model.tiny_copy import NoTinyCopyError
from services.trainer.model.value_head import ValueHead, value_head_for
from services.trainer.ranks.sharding import Ranks, shard

log = structlog.get_logger()

Scorer = Callable[..., tuple[torch.Tensor, ...]]  # a policy model, or another with its arguments and results


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        normalized = x * rstd
        ctx.save_for_backward(normalized, rstd, weight)
        return weight * normalized

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        """With n = x * rstd and g = grad * weight: dx = rstd * (g - n * mean(g * n))."""
        (grad,) = grads
        normalized, rstd, weight = ctx.saved_tensors
        grad_n = grad * normalized
        width = weight.shape[0]
        # mean(g * n) = (grad * n) @ weight / width: this needs no copy of g.
        along = (grad_n @ weight)[..., None].div_(-width)
        grad_x = (grad * weight).addcmul_(normalized, along).mul_(rstd)
        return grad_x, grad_n.reshape(-1, width).sum(0), None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """weight * x * rsqrt(mean(x^2) + eps) over the last axis. [..., width], [width] -> [..., width]"""
    output: torch.Tensor = _RmsNorm.apply(x, weight, eps)
    return output


def _forward(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    if hidden.dtype != torch.float32:  # mixed precision: the original computes in float32 and rounds back
        original: torch.Tensor = type(module).forward(module, hidden)
        return original
    return rms_norm(hidden, module.weight, module.variance_epsilon)


def speed_up_norms(model: torch.nn.Module, device: torch.device) -> int:
    """Replace the passes of every plain float32 RMSNorm of a model on the CPU; returns the number of norms.

    A norm with another formula (Gemma's 1 + weight) gives other numbers in a test and stays as is. The weights may still
    be on the meta device.
    """
    if device.type != "cpu":
        return 0
    count = 0
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and _is_plain(module):
            module.forward = MethodType(_forward, module)  # type: ignore[method-assign]
            count += 1
    return count


@torch.no_grad()
def _is_plain(module: Any) -> bool:
    weight = getattr(module, "weight", None)
    if weight is None or not hasattr(module, "variance_epsilon") or weight.ndim != 1:
        return False
    if weight.dtype != torch.float32:  # transformers' norm rounds any other type to float32 and back
        return False
    width = min(weight.shape[0], 64)  # the formula depends on no width
    trial = torch.linspace(0.5, 1.5, width)
    probe = torch.linspace(-1.0, 2.0, 3 * width).view(3, width)
    theirs = torch.func.functional_call(module, {"weight": trial}, (probe,))
    return torch.allclose(theirs, rms_norm(probe, trial, module.variance_epsilon), rtol=1e-6, atol=1e-6)


class PolicyModel(torch.nn.Module):
    """Wraps a causal LM. The root of sharding, so that embedding, final norm and head are gathered during ``forward``."""

    def __init__(
        self,
        causal_lm: Any,
        logprob_chunk_tokens: int = CHUNK_TOKENS,
        attention: Kernel = "auto",
        value_head: ValueHead | None = None,
    ) -> None:
        super().__init__()
        self._logprob_chunk_tokens = logprob_chunk_tokens
        self._own_attention = causal_lm.config._attn_implementation
        self._attention = register_attention(attention)
        if getattr(causal_lm.get_output_embeddings(), "weight", None) is None:
            raise ModelMismatchError(f"{type(causal_lm).__name__} has no LM head that is a matrix: train another model")
        causal_lm.set_attn_implementation(self._attention)
        self.causal_lm = causal_lm
        self.value_head = value_head
        self.logit_scale = 1.0  # of the model's own head, as ``self_test`` finds it
        self.limit: Limit | None = None
        # Of a model with an adapter, set once the base has its values.
        self.adapter: AdapterIdentity | None = None
        self.base: Base | None = None
        names = set(causal_lm._no_split_modules or ())
        # The repeated blocks: the unit of sharding and of gradient checkpointing. Found now: sharding renames classes.
        self.layers: list[torch.nn.Module] = [
            m
            for m in causal_lm.modules()
            if (type(m).__name__ in names if names else isinstance(m, GradientCheckpointingLayer))
        ]
        self.eval()

    def train(self, mode: bool = True) -> Self:
        """Stay in evaluation mode: noise comes under too many names to be switched off one by one."""
        return super().train(False)

    def forward(
        self,
        token_ids: torch.Tensor,  # [num_tokens] int64, branches end to end
        position_ids: torch.Tensor,  # [num_tokens] int64, from 0 in every document
        documents: Documents,
        targets: Targets,
        temperature: float,
        drawn: Drawn | None = None,  # the targets' sampling distributions; if given, each target is scored alone
    ) -> tuple[torch.Tensor, ...]:
        """Log-probability and entropy of each target under its sampling distribution. [num_targets] each

        With a value head also the value of the state before the target. [num_targets]

        Raises ``ModelMismatchError`` for a document beyond the model's ``limit``.
        """
        if self.limit is not None:
            self.limit.check(documents.max_length)
        hidden = self._below_head()(
            input_ids=token_ids[None], position_ids=position_ids[None], documents=documents, use_cache=False
        ).last_hidden_state[0]  # [num_tokens, hidden]
        # Only states that predict a trained token pass a head.
        predicting = hidden.index_select(0, targets.predecessors)
        logprobs, entropy = token_logprobs(
            predicting if self.logit_scale == 1.0 else predicting * self.logit_scale,
            self.causal_lm.get_output_embeddings().weight,
            targets.token_ids,
            temperature,
            self._logprob_chunk_tokens,
            drawn=drawn,
        )
        scores = (logprobs, entropy) if self.value_head is None else (logprobs, entropy, self.value_head(predicting))
        return tuple(targets.each(score) for score in scores)

    @torch.no_grad()
    def plain(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One document through the model's own forward pass and attention: its logits, and those of the head's matrix alone.

        [num_tokens] -> [num_tokens, vocabulary] twice
        """
        self.causal_lm.set_attn_implementation(self._own_attention)
        try:
            logits = self.causal_lm(input_ids=token_ids[None], use_cache=False).logits[0]
            hidden = self._below_head()(input_ids=token_ids[None], use_cache=False).last_hidden_state[0]
            return logits, hidden @ self.causal_lm.get_output_embeddings().weight.to(hidden.dtype).T
        finally:
            self.causal_lm.set_attn_implementation(self._attention)

    def _below_head(self) -> Any:
        base = self.causal_lm.base_model  # the model itself where the attribute has another name
        return base if base is not self.causal_lm else base.get_decoder()

    def published(self) -> Mapping[str, torch.Tensor]:
        """The tensors of a version, by name: those of the adapter if there is one, else all weights."""
        return named_weights(self.causal_lm) if self.adapter is None else adapter_weights(self.causal_lm)


def build_policy_model(
    causal_lm: Any,
    ranks: Ranks,
    *,
    trainable: bool = True,
    gradient_checkpointing: bool = False,
    compute_dtype: torch.dtype | None = None,
    offload: bool = False,
    attention: Kernel = "auto",
    logprob_chunk_tokens: int = CHUNK_TOKENS,
    value_head: bool = False,
    adapter: AdapterSetup | None = None,
) -> PolicyModel:
    """Prepare a model for training (or as a frozen reference) on these ranks.

    A model on the meta device gets the memory of its weights later. ``offload`` keeps the weights on the host. With
    ``adapter`` only the adapter is trained, and the value head.

    Raises:
        ConfigError: a target of the adapter is no linear module of the model.
    """
    if adapter is not None:
        attach(causal_lm, adapter.config, adapter.dtype)
    head = value_head_for(causal_lm) if value_head else None
    model = PolicyModel(causal_lm, logprob_chunk_tokens, attention, head)
    if trainable and gradient_checkpointing:
        for layer in model.layers:  # not transformers' own, which asks for training mode
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)  # type: ignore[method-assign]
    elif not trainable:
        model.requires_grad_(False)
    if not causal_lm.get_input_embeddings().weight.is_meta:
        model.to(ranks.device)
        if adapter is not None:
            reset_adapter(causal_lm, adapter)
    if trainable:
        speed_up_norms(model, ranks.device)
    shard(model, model.layers, ranks, compute_dtype, offload, exact=[] if head is None else [head])
    register_fsdp_forward_method(model, "plain")
    return model


def load_policy_model(
    path: str | Path,
    ranks: Ranks,
    *,
    dtype: torch.dtype = torch.float32,
    trainable: bool = True,
    gradient_checkpointing: bool = False,
    compute_dtype: torch.dtype | None = None,
    offload: bool = False,
    attention: Kernel = "auto",
    logprob_chunk_tokens: int = CHUNK_TOKENS,
    value_head: bool = False,
    adapter: AdapterSetup | None = None,
) -> PolicyModel:
    """Load from a directory or hub name, with master weights in ``dtype``; each rank reads only its own rows.

    Raises the errors of ``services.common.text.huggingface.load_model``.
    """
    by_shards = open_by_shards(path, dtype)
    causal_lm = by_shards.causal_lm if by_shards is not None else load_model(path, dtype)
    try:
        limit = architecture_limit(causal_lm.config)
    except NoTinyCopyError as reason:
        limit = None
        log.warning("model.no_tiny_copy", path=str(path), reason=str(reason))
    model = build_policy_model(
        causal_lm,
        ranks,
        trainable=trainable,
        gradient_checkpointing=gradient_checkpointing,
        compute_dtype=compute_dtype,
        offload=offload,
        attention=attention,
        logprob_chunk_tokens=logprob_chunk_tokens,
        value_head=value_head,
        adapter=adapter,
    )
    if by_shards is not None:
        began = time.monotonic()
        read = by_shards.materialize(model, ranks.device, offload)
        if model.value_head is not None:
            model.value_head.reset()
        if adapter is not None:
            reset_adapter(model.causal_lm, adapter)
        log.info("model.loaded", path=str(path), bytes=read, seconds=round(time.monotonic() - began, 3))
    model.limit = limit
    check_loaded(model, ranks.device)
    return model


def architecture_limit(config: Any) -> Limit | None:
    """``check_architecture`` of the policy model."""
    return check_architecture(config, _small)


def _small(causal_lm: Any) -> PolicyModel:
    return PolicyModel(causal_lm, attention="sdpa")
