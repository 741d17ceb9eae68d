"""The model being trained: a Hugging Face causal LM that returns log-probabilities of chosen tokens, never logits.

It knows nothing about losses, optimizers or batches. Attention runs over packed documents (``attention``), the head
in blocks (``logprobs``). Dropout is off: a ratio of probabilities must be 1 for the policy against itself.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import structlog
import torch

from services.common.errors import ModelMismatchError
from services.common.models import load_model
from services.trainer.attention import Documents, Kernel, register_attention
from services.trainer.drawn import Drawn
from services.trainer.logprobs import CHUNK_TOKENS, token_logprobs
from services.trainer.norms import speed_up_norms
from services.trainer.sharded_load import open_by_shards
from services.trainer.sharding import Ranks, shard
from services.trainer.value_head import ValueHead, value_head_for

log = structlog.get_logger()


class PolicyModel(torch.nn.Module):
    """The root of sharding, so that embedding, final norm and head are gathered while ``forward`` runs."""

    def __init__(
        self,
        causal_lm: Any,
        logprob_chunk_tokens: int = CHUNK_TOKENS,
        attention: Kernel = "auto",
        value_head: ValueHead | None = None,
    ) -> None:
        super().__init__()
        self._logprob_chunk_tokens = logprob_chunk_tokens
        _check_head(causal_lm)
        causal_lm.set_attn_implementation(register_attention(attention))
        _disable_dropout(causal_lm)
        self.causal_lm = causal_lm
        self.value_head = value_head
        names = set(causal_lm._no_split_modules or ())
        # The repeated blocks: the unit of sharding and of gradient checkpointing. Found now: sharding renames classes.
        self.layers: list[torch.nn.Module] = [m for m in causal_lm.modules() if type(m).__name__ in names]

    def forward(
        self,
        token_ids: torch.Tensor,  # [num_tokens] int64, documents end to end
        position_ids: torch.Tensor,  # [num_tokens] int64, from 0 in every document
        documents: Documents,
        target_positions: torch.Tensor,  # [num_targets] int64, none of them the first of its document
        temperature: float,
        drawn: Drawn | None = None,  # what was cut of the targets' distributions
    ) -> tuple[torch.Tensor, ...]:
        """Log-probability and entropy at each target, of the distribution that it was drawn from. [num_targets] each

        With a value head also the value of the state in which the target was drawn. [num_targets]
        """
        hidden = self.causal_lm.base_model(
            input_ids=token_ids[None], position_ids=position_ids[None], documents=documents, use_cache=False
        ).last_hidden_state[0]  # [num_tokens, hidden]
        predicting = hidden.index_select(0, target_positions - 1)  # only what predicts a trained token passes a head
        logprobs, entropy = token_logprobs(
            predicting,
            self.causal_lm.get_output_embeddings().weight,
            token_ids.index_select(0, target_positions),
            temperature,
            self._logprob_chunk_tokens,
            drawn=drawn,
        )
        return (logprobs, entropy) if self.value_head is None else (logprobs, entropy, self.value_head(predicting))


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
) -> PolicyModel:
    """Prepare a model for training (or as a frozen reference) on these ranks.

    It may be on the meta device; its weights then get their memory later. ``offload`` keeps them on the host.
    """
    head = value_head_for(causal_lm) if value_head else None
    model = PolicyModel(causal_lm, logprob_chunk_tokens, attention, head)
    if trainable:
        model.train()
        if gradient_checkpointing:
            # transformers renamed it in 5.x and warns about the old name.
            new_name = getattr(causal_lm, "activation_checkpointing_enable", None)
            (new_name or causal_lm.gradient_checkpointing_enable)({"use_reentrant": False})
    else:
        model.eval().requires_grad_(False)
    if not causal_lm.get_input_embeddings().weight.is_meta:
        model.to(ranks.device)
    if trainable:
        speed_up_norms(model, ranks.device)
    shard(model, model.layers, ranks, compute_dtype, offload, exact=[] if head is None else [head])
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
) -> PolicyModel:
    """Load from a directory or hub name, with master weights in ``dtype``; each rank reads only what it will hold.

    Raises what ``services.common.models.load_model`` raises.
    """
    by_shards = open_by_shards(path, dtype)
    model = build_policy_model(
        by_shards.causal_lm if by_shards is not None else load_model(path, dtype),
        ranks,
        trainable=trainable,
        gradient_checkpointing=gradient_checkpointing,
        compute_dtype=compute_dtype,
        offload=offload,
        attention=attention,
        logprob_chunk_tokens=logprob_chunk_tokens,
        value_head=value_head,
    )
    if by_shards is not None:
        began = time.monotonic()
        read = by_shards.materialize(model, ranks.device, offload)
        if model.value_head is not None:
            model.value_head.reset()
        log.info("model.loaded", path=str(path), bytes=read, seconds=round(time.monotonic() - began, 3))
    return model


def _check_head(causal_lm: Any) -> None:
    """Refuse heads that do more than a product with a matrix: their log-probabilities would be silently wrong."""
    name, config = type(causal_lm).__name__, causal_lm.config
    if getattr(causal_lm.get_output_embeddings(), "bias", None) is not None:
        raise ModelMismatchError(f"{name} has a bias on its LM head, which the trainer does not support")
    for field in ("final_logit_softcapping", "logit_scale", "logits_scaling", "output_multiplier_scale"):
        value = getattr(config, field, None)
        if value not in (None, 1, 1.0):
            raise ModelMismatchError(f"{name} has {field}={value}, which the trainer does not support")


def _disable_dropout(causal_lm: torch.nn.Module) -> None:
    for module in causal_lm.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0  # type: ignore[assignment]
