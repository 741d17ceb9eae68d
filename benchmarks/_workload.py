"""The models and the lengths that the engine's and the trainer's benchmarks share; everything drawn from a seed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MODELS = {
    "small": {
        "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
        "intermediate_size": 768, "vocab_size": 4096,
    },
    "quickstart": {
        "hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24,
        "intermediate_size": 288, "vocab_size": 303,
    },
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Workload:
    """``num_requests`` prompts of 32 to 96 tokens (uniform), and how many tokens each generates."""

    name: str
    num_requests: int
    median: int
    sigma: float  # of the logarithm; 0: all equal
    longest: int

    def draw(self, vocab_size: int, seed: int) -> tuple[list[list[int]], list[int]]:
        random = np.random.default_rng(seed)
        prompts = [random.integers(0, vocab_size, size=n).tolist() for n in random.integers(32, 97, self.num_requests)]
        lengths = np.exp(np.log(self.median) + self.sigma * random.standard_normal(self.num_requests))
        return prompts, np.clip(np.rint(lengths), 1, self.longest).astype(int).tolist()

    def __str__(self) -> str:
        spread = f"log-normal, median {self.median}, sigma {self.sigma}" if self.sigma else f"all {self.median}"
        return f"{self.num_requests} requests, prompts uniform 32-96, new tokens {spread}, at most {self.longest}"
