"""Engines to examine, each with the model that it serves.

The suite asks one thing of all of them. What differs between them stands here: how each is started, where its words come
from, and whether there is a model whose forward pass its log-probabilities must equal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from services.inference.engine.base import Engine, Generation, GenerationRequest, KvPolicy
from services.inference.engine.scripted import ScriptedEngine
from services.inference.engine.weight_update import WeightUpdate
from tests.random_models import build_model, make_prompt, perturbed

CONTEXT = 600  # tokens
NUM_SLOTS = 2


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A started engine of two slots that holds version 0."""

    engine: Engine
    model: Any  # what version 0 computes; None where there is no model
    weights: Mapping[str, Any]  # of version 0; shapes alone where there is no model
    watches: bool  # calls ``GenerationRequest.watch``

    def next_model(self, seed: int = 1) -> Any:
        """Other weights of the same shapes, for another version."""
        return perturbed(self.model, seed)

    def same_weights(self, version: int) -> WeightUpdate:
        """An update that changes nothing but the version."""
        return WeightUpdate.full(self.weights, version)


class Shape:
    """A tensor of an engine without a model."""

    def __init__(self, *shape: int) -> None:
        self.shape = shape


def words(request: GenerationRequest) -> list[int]:
    """What an engine says that samples nothing: more than any budget here, with every token in it."""
    return make_prompt(CONTEXT, seed=5)


async def start_embedded(kind: str, kv_policy: KvPolicy) -> Subject:
    """``KIND-MODEL``: ``torch`` or ``forced`` with a model of that architecture, or ``scripted`` alone."""
    kind, _, architecture = kind.partition("-")
    engine: Any
    if kind == "scripted":
        weights: dict[str, Any] = {"model.norm.weight": Shape(64)}
        engine = ScriptedEngine(
            words,
            num_slots=NUM_SLOTS,
            context_length=CONTEXT,
            tokens_per_second=2000,
            shapes=weights,
            kv_policy=kv_policy,
        )
        model = None
    else:
        from services.common.models import named_weights
        from services.inference.engine.forced import ForcedEngine
        from services.inference.engine.torch_engine import TorchEngine

        model = build_model(architecture)
        weights = named_weights(model)
        settings: dict[str, Any] = {"num_slots": NUM_SLOTS, "context_length": CONTEXT, "kv_policy": kv_policy}
        if kind == "forced":
            engine = _with_words_to_say(ForcedEngine(build_model(architecture), **settings))
        else:
            engine = TorchEngine(build_model(architecture), **settings)
    await engine.start()
    return Subject(engine=engine, model=model, weights=weights, watches=kind != "scripted")


def _with_words_to_say(engine: Any) -> Any:
    """A forced engine for tests that do not care what is said."""
    generate = engine.generate

    async def forced(request: GenerationRequest) -> Generation:
        return await generate(replace(request, forced_ids=tuple(words(request))))

    engine.generate = forced
    return engine


async def until_tokens(engine: Engine, count: int) -> None:
    """Wait until ``count`` more tokens are there than now."""
    wanted = engine.health().generated_tokens + count
    async with asyncio.timeout(20):
        while engine.health().generated_tokens < wanted:
            await asyncio.sleep(0.001)


async def until_idle(engine: Engine) -> None:
    """Wait until nothing runs and nothing waits."""
    async with asyncio.timeout(20):
        while engine.health().running or engine.health().waiting:
            await asyncio.sleep(0.001)
