"""Engines to examine, each with its model.

The suite tests the same properties of all engines. Their differences are here: the start, the source of the tokens, and
the model for the expected log-probabilities by a forward pass, if there is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from services.common.config.processes import InferenceConfig
from services.inference.engine.base import Engine, Generation, GenerationRequest, KvPolicy, WeightUpdate
from services.inference.engine.scripted import ScriptedEngine
from tests.random_models import build_model, make_prompt, perturbed
from tests.waiting import until

CONTEXT = 600  # tokens
NUM_SLOTS = 2


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A started engine of two slots that holds version 0."""

    engine: Engine
    model: Any  # the model of version 0; None without a model
    weights: Mapping[str, Any]  # of version 0; shapes alone where there is no model
    watches: bool  # calls ``GenerationRequest.watch``
    cuts_in_turn: bool = True  # top-p is a share of what top-k has left; otherwise of the whole distribution
    min_p_first: bool = False  # top-p is a share of what min-p has left

    def next_model(self, seed: int = 1) -> Any:
        """Other weights of the same shapes, for another version."""
        return perturbed(self.model, seed)

    def same_weights(self, version: int) -> WeightUpdate:
        """An update that changes only the version."""
        return WeightUpdate.full(self.weights, version)


class Shape:
    """A tensor of an engine without a model."""

    def __init__(self, *shape: int) -> None:
        self.shape = shape


def words(request: GenerationRequest) -> list[int]:
    """Tokens for the replay engine: more than any budget here, with every token of the vocabulary."""
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
        from services.common.weights.snapshot import named_weights
        from services.inference.engine.torch.engine import ReplayEngine, TorchEngine

        model = build_model(architecture)
        weights = named_weights(model)
        settings: dict[str, Any] = {"num_slots": NUM_SLOTS, "context_length": CONTEXT, "kv_policy": kv_policy}
        if kind == "forced":
            engine = _with_words_to_say(ReplayEngine(build_model(architecture), **settings))
        else:
            engine = TorchEngine(build_model(architecture), **settings)
    await engine.start()
    return Subject(engine=engine, model=model, weights=weights, watches=kind != "scripted")


def _with_words_to_say(engine: Any) -> Any:
    """A replay engine for tests that do not depend on the text."""
    generate = engine.generate

    async def forced(request: GenerationRequest) -> Generation:
        return await generate(replace(request, forced_ids=tuple(words(request))))

    engine.generate = forced
    return engine


# Settings of the model. vLLM's attention on a CPU takes head dimensions that are multiples of 32, and with few layers vLLM would end
# a request before its HTTP server has written the first tokens.
MODELS: dict[str, dict[str, int]] = {"sglang": {}, "vllm": {"head_dim": 32, "num_layers": 16}}
# The order in which a program cuts its distribution.
CUTS = {"sglang": {"cuts_in_turn": False}, "vllm": {"min_p_first": True}}


class SharedServer:
    """One true server for many tests, because its start takes 20 s. Lent idle, with version 0."""

    def __init__(self, engine: str, directory: Path) -> None:
        self._engine = engine
        self._directory = directory
        self._subject: Subject | None = None
        self._kv_policy: KvPolicy | None = None
        self._num_started = 0

    async def lend(self, kv_policy: KvPolicy) -> Subject:
        """The engine, restarted after a test that stopped the engine, and for another policy."""
        if self._subject is not None and (kv_policy is not self._kv_policy or not self._subject.engine.health().ok):
            await self.stop()
        if self._subject is None:
            self._subject, self._kv_policy = await self._start(kv_policy), kv_policy
        engine = self._subject.engine
        await until_idle(engine)
        if engine.version != 0:
            await engine.update(self._subject.same_weights(0))
        return self._subject

    async def stop(self) -> None:
        if self._subject is not None:
            subject, self._subject = self._subject, None
            await subject.engine.stop()

    async def _start(self, kv_policy: KvPolicy) -> Subject:
        from services.common.weights.snapshot import named_weights

        self._num_started += 1
        model = build_model("qwen3", **MODELS[self._engine])
        path = self._directory / "model"
        model.save_pretrained(path)
        engine = server_engine(
            self._engine, path, named_weights(model), self._directory / str(self._num_started), kv_policy=kv_policy
        )
        await engine.start()
        return Subject(engine=engine, model=model, weights=named_weights(model), watches=True, **CUTS[self._engine])


def server_engine(
    engine: str,
    model: Path,
    weights: Mapping[str, Any],
    directory: Path,
    number: int = 1,
    adapter: Any = None,
    **changes: Any,
) -> Any:
    """Not started, with the context of all subjects and two slots on each of ``number`` servers; ``changes`` are settings
    of the inference service."""
    from services.inference.engine.served.engine import ServedSetup
    from services.inference.loading import server_builder

    settings = {"engine": engine, "device": "cpu", "num_slots": NUM_SLOTS, **changes}
    return server_builder(engine)(
        ServedSetup(
            config=InferenceConfig.model_validate(settings),
            name="subject",
            model_path=str(model),
            context_length=CONTEXT,
            tensors=weights,
            directory=directory,
            number=number,
            adapter=adapter,
        )
    )


async def until_tokens(engine: Engine, count: int) -> None:
    """Wait until ``count`` more tokens are there than now."""
    wanted = engine.health().generated_tokens + count
    await until(lambda: engine.health().generated_tokens >= wanted, every_s=0.001)


async def until_idle(engine: Engine) -> None:
    """Wait until no request runs or waits."""
    await until(lambda: not (engine.health().running or engine.health().waiting), every_s=0.001)
