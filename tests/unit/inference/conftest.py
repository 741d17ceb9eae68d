"""Tiny random models, running engines, and a gate that stops an engine after an exact number of steps."""

from __future__ import annotations

import asyncio
import copy
import itertools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from services.common.types import Sampling
from services.inference.engine.base import Engine, GenerationRequest

VOCAB = 301
_ids = itertools.count()


def make_request(
    prompt: list[int],
    *,
    stop: tuple[int, ...] = (),
    seed: int | None = 0,
    forced: list[int] | None = None,
    **sampling: Any,
) -> GenerationRequest:
    return GenerationRequest(
        request_id=f"request-{next(_ids)}",
        prompt_ids=tuple(prompt),
        sampling=Sampling(**sampling),
        stop_token_ids=stop,
        seed=seed,
        forced_ids=None if forced is None else tuple(forced),
    )


def make_prompt(length: int, seed: int = 0) -> list[int]:
    return [(7 + 13 * seed + 31 * i + i * i * (seed + 1)) % VOCAB for i in range(length)]


def build_model(kind: str, *, tied: bool = True, seed: int = 0) -> Any:
    """A random model of 2 layers; weights large enough that distributions are far from uniform."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "initializer_range": 0.15,
    }
    config = {
        "qwen3": lambda: Qwen3Config(head_dim=24, **sizes),
        "qwen2": lambda: Qwen2Config(**sizes),
        "llama": lambda: LlamaConfig(**sizes),
    }[kind]()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:  # initialised to constants, which would hide mistakes
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def perturbed(model: Any, seed: int = 1, scale: float = 0.05) -> Any:
    """A copy with other weights: the next version."""
    import torch

    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return other


def reference_logprobs(model: Any, token_ids: list[int], first: int, *, temperature: float = 1.0) -> Any:
    """Log-probabilities of ``token_ids[first:]`` by a plain transformers forward pass, [len - first, vocabulary]."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([token_ids])).logits[0, first - 1 : -1].float()
    return torch.log_softmax(logits / temperature, dim=-1)


class StepGate:
    """An ``on_tokens`` hook that holds the engine thread after step ``at`` until a command lies in its inbox."""

    def __init__(self, at: int) -> None:
        self._at = at
        self._steps = 0
        self._loop = asyncio.get_running_loop()
        self._reached = asyncio.Event()
        self._open = threading.Event()

    def __call__(self, num_tokens: int, when: float) -> None:
        self._steps += 1
        if self._steps == self._at:
            self._loop.call_soon_threadsafe(self._reached.set)
            assert self._open.wait(timeout=20), "nobody came through the gate"

    async def run(self, command: Awaitable[Any]) -> Any:
        """Run ``command`` exactly between steps ``at`` and ``at + 1``."""
        async with asyncio.timeout(20):
            await self._reached.wait()
        task = asyncio.ensure_future(command)
        await asyncio.sleep(0)
        self._open.set()
        return await task


Launch = Callable[..., Awaitable[Any]]


@pytest.fixture
async def launch() -> AsyncIterator[Launch]:
    """Start a torch engine on a deep copy of a model; all are stopped at the end."""
    from services.inference.engine.torch_engine import TorchEngine

    running: list[Engine] = []

    async def start(model: Any, kind: type[TorchEngine] = TorchEngine, **settings: Any) -> TorchEngine:
        engine = kind(copy.deepcopy(model), **{"num_slots": 8, "context_length": 256, **settings})
        await engine.start()
        running.append(engine)
        return engine

    yield start
    for engine in running:
        await engine.stop()
