"""The value head: from the last hidden state to the expected return. A linear map that starts at 0.

It is of the trainer alone: neither published to replicas nor in the exported model, but in every checkpoint. Its weights
are float32 at least, whatever the type of the model's.
"""

from __future__ import annotations

import torch

from services.common.config.credit import ValueHeadConfig

NAME = "value_head."  # how the names of its parameters begin


class ValueHead(torch.nn.Module):
    """V = hidden . weight + bias, in its own precision."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        # Vectors, so that shards of all ranks are alike in size and weight decay leaves them alone.
        self.weight = torch.nn.Parameter(torch.zeros(width, dtype=dtype, device=device))
        self.bias = torch.nn.Parameter(torch.zeros(1, dtype=dtype, device=device))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden] -> [num_tokens]"""
        return hidden.to(self.weight.dtype) @ self.weight + self.bias

    @torch.no_grad()
    def reset(self) -> None:
        """Back to 0: a model that gets its memory late has none before."""
        self.weight.zero_()
        self.bias.zero_()


def value_head_for(causal_lm: torch.nn.Module) -> ValueHead:
    """A head for the model, where the model's weights are (which may be the meta device)."""
    embeddings = causal_lm.get_input_embeddings().weight  # type: ignore[operator]
    dtype = torch.promote_types(embeddings.dtype, torch.float32)
    return ValueHead(int(causal_lm.config.hidden_size), dtype, embeddings.device)  # type: ignore[union-attr, arg-type]


def own_rates(config: ValueHeadConfig | None) -> dict[str, float]:
    """The peak learning rate of the head for the optimizer, where it has one of its own."""
    return {} if config is None or config.lr is None else {NAME: config.lr}
