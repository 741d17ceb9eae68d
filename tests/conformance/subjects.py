"""Engines to examine, each with the model that it serves.

The suite asks one thing of all of them. What differs between them stands here: how each is started, where its words come
from, and whether there is a model whose forward pass its log-probabilities must equal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from services.common.config.services import InferenceConfig
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
    cuts_in_turn: bool = True  # top-p is a share of what top-k has left; otherwise of the whole distribution

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


class SharedSglang:
    """One true SGLang server for many tests, for it takes 20 s to start. Lent with version 0 and nothing to do."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._subject: Subject | None = None
        self._kv_policy: KvPolicy | None = None
        self._num_started = 0

    async def lend(self, kv_policy: KvPolicy) -> Subject:
        """Started anew after a test that stopped it, and for another policy."""
        if self._subject is not None and (kv_policy is not self._kv_policy or not self._subject.engine.health().ok):
            await self.stop()
        if self._subject is None:
            self._subject, self._kv_policy = await self._start(kv_policy), kv_policy
        engine = self._subject.engine
        await engine.resume()
        await until_idle(engine)
        if engine.version != 0:
            await engine.update(self._subject.same_weights(0))
        await engine.flush()
        return self._subject

    async def stop(self) -> None:
        if self._subject is not None:
            subject, self._subject = self._subject, None
            await subject.engine.stop()

    async def _start(self, kv_policy: KvPolicy) -> Subject:
        from services.common.models import named_weights

        self._num_started += 1
        model = build_model("qwen3")
        path = self._directory / "model"
        model.save_pretrained(path)
        engine = sglang_engine(
            path, named_weights(model), self._directory / str(self._num_started), kv_policy=kv_policy
        )
        await engine.start()
        return Subject(engine=engine, model=model, weights=named_weights(model), watches=True, cuts_in_turn=False)


def sglang_engine(model: Path, weights: Mapping[str, Any], directory: Path, number: int = 1, **changes: Any) -> Any:
    """Not started, with the context of all subjects and two slots on each of ``number`` servers; ``changes`` are settings
    of the inference service."""
    from services.inference.engine.sglang.build import build_engine

    settings = {"engine": "sglang", "device": "cpu", "num_slots": NUM_SLOTS, **changes}
    return build_engine(
        InferenceConfig.model_validate(settings),
        name="subject",
        model_path=str(model),
        context_length=CONTEXT,
        tensors=weights,
        directory=directory,
        number=number,
    )


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
