"""The value head: a linear map from the last hidden state to the expected return, initially 0.

Only the trainer uses the value head: checkpoints contain the head, snapshots and exports do not. Its weights are float32
at least, for any type of the model's weights.
"""

from __future__ import annotations

import torch

from services.common.config.training.credit import ValueHeadConfig

NAME = "value_head."  # prefix of the names of its parameters


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
        """Set the weights to 0, after a model on the meta device has got its memory."""
        self.weight.zero_()
        self.bias.zero_()


def value_head_for(causal_lm: torch.nn.Module) -> ValueHead:
    """A head for the model, on the device of the model's weights (which may be the meta device)."""
    embeddings = causal_lm.get_input_embeddings().weight  # type: ignore[operator]
    dtype = torch.promote_types(embeddings.dtype, torch.float32)
    return ValueHead(int(causal_lm.config.hidden_size), dtype, embeddings.device)  # type: ignore[union-attr, arg-type]


def own_rates(config: ValueHeadConfig | None) -> dict[str, float]:
    """The head's own peak learning rate for the optimizer, if the settings have one."""
    return {} if config is None or config.lr is None else {NAME: config.lr}
