"""Delta updates while the torch engine generates: exact, between two steps, and atomic."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import DeadlineError, InfrastructureError
from services.common.weights.codec import decode_tensor, encode_tensor
from services.common.weights.snapshot import Bits, named_weights
from services.inference.engine.base import WeightUpdate
from services.inference.engine.torch import engine as torch_engine
from services.inference.engine.torch.decoder import PreparedUpdate, prepare
from tests.random_models import TOLERANCE, build_model, make_prompt, make_request, max_gap, perturbed
from tests.unit.inference.conftest import Launch, StepGate


def partly_perturbed(model: Any, seed: int = 1) -> Any:
    """A copy in which about one element in five differs; one tensor is unchanged."""
    new = perturbed(model, seed, scale=0.2)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for number, (own, old) in enumerate(zip(new.parameters(), model.parameters(), strict=True)):
            keep = torch.rand(own.shape, generator=draw) < (1.0 if number == 3 else 0.8)
            own.copy_(torch.where(keep, old, own))
    return new


def delta(old: Any, new: Any, version: int) -> WeightUpdate:
    """The update that a replica builds from a delta of float32 weights."""
    changes = {}
    for name, before in named_weights(old).items():
        bits = [
            tensor.reshape(-1).numpy().view(np.uint32) for tensor in (before, dict(new.named_parameters())[name].data)
        ]
        coded = encode_tensor(bits[0], bits[1], "float32")
        if coded:
            changes[name] = list(decode_tensor(bits[0], coded, "float32"))
    return WeightUpdate(version=version, changes=changes, dtype="float32", complete=False)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen2"])
async def test_logprobs_are_exact_over_two_deltas_in_mid_generation(launch: Launch, kind: str, tied: bool) -> None:
    models = [build_model(kind, tied=tied)]
    models += [partly_perturbed(models[0], 1)]
    models += [partly_perturbed(models[1], 2)]
    gate = StepGate(at=8)
    engine = await launch(models[0], on_tokens=gate)
    prompts = [make_prompt(40), make_prompt(5, 3), [*make_prompt(40), 9, 8]]
    pending = [
        asyncio.ensure_future(engine.generate(make_request(p, seed=i, max_new_tokens=200)))
        for i, p in enumerate(prompts)
    ]
    updates = [delta(models[number - 1], models[number], number) for number in (1, 2)]
    assert any(name not in updates[0].changes for name in named_weights(models[0])), "one tensor has no change"
    await gate.run(engine.update(updates[0]))
    await engine.update(updates[1])
    for prompt, generation in zip(prompts, await asyncio.gather(*pending), strict=True):
        assert generation.segments[0].weight_version == 0 and generation.segments[-1].weight_version == 2
        assert sum(segment.num_tokens for segment in generation.segments) == 200, "no token is dropped"
        for segment in generation.segments:
            assert segment.weight_version is not None
            assert max_gap(models[segment.weight_version], prompt, generation, segment) <= TOLERANCE
        assert max_gap(models[1], prompt, generation, generation.segments[-1]) > 100 * TOLERANCE
    for name, own in engine._core.decoder.weights.items():
        assert torch.equal(own, dict(models[2].named_parameters())[name].data), name


async def test_a_write_that_fails_half_way_ends_the_engine_before_another_token(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = build_model("qwen3")
    gate = StepGate(at=8)
    engine = await launch(old, on_tokens=gate)
    pending = asyncio.ensure_future(engine.generate(make_request(make_prompt(10), max_new_tokens=200)))

    generated: list[int] = []

    def half(self: PreparedUpdate) -> None:
        generated.append(engine.counters.generated)
        for write in self.writes[: len(self.writes) // 2]:
            write()
        raise MemoryError("the test took it away")

    monkeypatch.setattr(PreparedUpdate, "apply", half)
    with pytest.raises(InfrastructureError, match="the test took it away"):
        await gate.run(engine.update(delta(old, partly_perturbed(old), 1)))
    with pytest.raises(InfrastructureError):
        await pending
    assert not engine.health().ok and [engine.counters.generated] == generated
    with pytest.raises(InfrastructureError):
        await engine.generate(make_request(make_prompt(3), max_new_tokens=1))


async def test_an_update_whose_caller_has_given_up_is_not_applied(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its arrays may hold another version by then."""
    old = build_model("qwen3")
    new = partly_perturbed(old)
    gate = StepGate(at=8)
    engine = await launch(old, on_tokens=gate)
    prompt = make_prompt(10)
    pending = asyncio.ensure_future(engine.generate(make_request(prompt, max_new_tokens=60)))
    await gate._reached.wait()  # the engine's thread is blocked
    with monkeypatch.context() as hasty:
        hasty.setattr(torch_engine, "CONTROL_TIMEOUT_S", 0.05)
        with pytest.raises(DeadlineError, match="engine update"):
            await engine.update(delta(old, new, 1))
    gate._open.set()
    generation = await pending
    assert [segment.weight_version for segment in generation.segments] == [0]
    assert max_gap(old, prompt, generation, generation.segments[0]) <= TOLERANCE
    await engine.update(delta(old, new, 1))
    again = await engine.generate(make_request(prompt, max_new_tokens=20))
    assert max_gap(new, prompt, again, again.segments[0]) <= TOLERANCE


# -- Changing weights in place gives exactly the model of the whole version, for all types.


SIGNED = {"float32": torch.int32, "bfloat16": torch.int16, "float16": torch.int16}


def bits_of(tensor: torch.Tensor, dtype: str) -> Bits:
    kind = np.uint32 if dtype == "float32" else np.uint16
    bits: Bits = tensor.to(getattr(torch, dtype)).contiguous().view(-1).view(SIGNED[dtype]).numpy().view(kind).copy()
    return bits


@pytest.mark.parametrize("own", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("published", ["float32", "bfloat16", "float16"])
@settings(max_examples=15, deadline=None)
@given(share=st.sampled_from([0.0, 0.01, 0.3, 1.0]), seed=st.integers(0, 99))
def test_changes_in_place_equal_the_whole_tensor(published: str, own: str, share: float, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    old = torch.randn(40, 30, generator=draw).to(getattr(torch, published))
    step = torch.randn(40, 30, generator=draw) * (torch.rand(40, 30, generator=draw) < share)
    new = (old.float() + step).to(getattr(torch, published))
    coded = encode_tensor(bits_of(old, published), bits_of(new, published), published)
    changes = list(decode_tensor(bits_of(old, published), coded, published))
    in_place, whole = ({"w": old.to(getattr(torch, own))} for _ in range(2))
    prepare(WeightUpdate(version=1, changes={"w": changes}, dtype=published, complete=False), in_place).apply()
    prepare(WeightUpdate.full({"w": new}, 1), whole).apply()
    assert torch.equal(in_place["w"], whole["w"])
