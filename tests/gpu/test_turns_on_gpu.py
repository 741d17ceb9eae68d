"""Turns on one card: tensors of a GPU leave it and come back with their bits, and requests go on with exact log-probabilities."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from services.common.system.parking import Parked, Released, return_freed_memory
from services.common.weights.snapshot import named_weights
from services.inference.engine.base import WeightUpdate
from services.inference.engine.torch.decoder import Stepping
from services.inference.engine.torch.engine import TorchEngine
from services.trainer.ranks import full, init_ranks, leave_ranks
from tests.random_models import build_model, make_prompt, make_request, max_gap, perturbed
from tests.unit.trainer.building import algorithm, rank_batch, tiny_causal_lm, train_step, training_sequences
from tests.waiting import until

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.needs("CUDA"),
]

TOLERANCE = 2e-3  # float32 with the GPU's own order of summation
TOKENS = 400
MIB = 1 << 20


def test_parked_tensors_leave_the_card_and_come_back_with_their_bits(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(64 * MIB // 4, device="cuda"), torch.randn(9, device="cuda").to(torch.bfloat16)]
    view, before = tensors[0][5:], [tensor.cpu() for tensor in tensors]
    held = torch.cuda.memory_reserved()
    parked = Parked([*tensors, view], tmp_path)
    return_freed_memory()
    assert held - torch.cuda.memory_reserved() >= 64 * MIB
    parked.restore()
    assert all(torch.equal(tensor.cpu(), kept) for tensor, kept in zip(tensors, before, strict=True))
    assert torch.equal(view.cpu(), before[0][5:]), "a view has the storage of its tensor"


def test_released_storages_of_a_card_can_be_written_again() -> None:
    tensor = torch.ones(64 * MIB // 4, device="cuda")
    held = torch.cuda.memory_reserved()
    released = Released([tensor, tensor[5:]])
    assert held - torch.cuda.memory_reserved() >= 64 * MIB
    released.restore()
    tensor.fill_(2.0)
    assert bool((tensor == 2.0).all())


def test_a_trainer_that_is_parked_between_steps_trains_the_same_bits(tmp_path: Path) -> None:
    ranks = init_ranks(timeout_s=60.0, device="cuda", always_group=True)
    try:
        results = []
        for parking in (False, True):
            step = train_step(
                algorithm("m2po", kl_coefficient=0.1), causal_lm=tiny_causal_lm(), ranks=ranks,
                reference=tiny_causal_lm(seed=1),
            )  # fmt: skip
            for seed in (0, 1, 2):
                step.run(rank_batch(training_sequences(8, seed=seed)))
                if parking:
                    state = [value for values in step.optimizer.adamw.state.values() for value in values.values()]
                    on_card = [value for value in (*step.model.parameters(), *state) if value.device.type == "cuda"]
                    Parked(on_card, tmp_path).restore()
            results.append({name: full(weight).cpu() for name, weight in named_weights(step.model.causal_lm).items()})
    finally:
        leave_ranks()
    for name, weight in results[0].items():
        assert torch.equal(results[1][name], weight), name


@pytest.mark.parametrize("stepping", ["eager", "graph"])
async def test_a_request_goes_on_after_a_turn_of_the_trainer(stepping: Stepping) -> None:
    model = build_model("qwen3", tied=False)
    newer = perturbed(model)
    served = build_model("qwen3", tied=False)
    # A cache of more than 20 MiB has memory of its own, which goes back whole.
    engine = TorchEngine(served, num_slots=64, context_length=1024, device="cuda", stepping=stepping)
    await engine.start()
    try:
        prompt = make_prompt(30)
        running = asyncio.ensure_future(engine.generate(make_request(prompt, max_new_tokens=TOKENS)))
        await until(lambda: engine.health().generated_tokens > 20)
        cache = engine._core.decoder.cache.kv.nbytes
        assert cache > 20 * MIB
        held = torch.cuda.memory_reserved()
        await engine.release()
        assert held - torch.cuda.memory_reserved() > 0.8 * cache
        weights = {name: weight.clone() for name, weight in named_weights(newer).items()}
        await engine.restore(WeightUpdate.full(weights, 1))
        generation = await running
    finally:
        await engine.stop()
    assert [segment.weight_version for segment in generation.segments] == [0, 1]
    assert max_gap(newer, prompt, generation, generation.segments[1]) <= TOLERANCE
    assert max_gap(model, prompt, generation, generation.segments[0]) <= TOLERANCE
