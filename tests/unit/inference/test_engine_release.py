"""The torch engine frees its memory between two turns on a device: requests go on with exact log-probabilities."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from services.common.errors import ModelMismatchError
from services.common.weights.snapshot import named_weights
from services.inference.engine.base import FinishReason, KvPolicy, ScoreRequest, SharesDevice, WeightUpdate
from services.inference.engine.torch.engine import TorchEngine
from tests.random_models import TOLERANCE, build_model, make_prompt, make_request, max_gap, perturbed
from tests.unit.inference.conftest import Launch, StepGate
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("each_decoder")

TOKENS = 200


@pytest.mark.parametrize("kv_policy", list(KvPolicy))
async def test_a_request_goes_on_after_a_turn_of_another_with_exact_logprobs(
    launch: Launch, kv_policy: KvPolicy
) -> None:
    model = build_model("qwen3", tied=False)
    newer = perturbed(model)
    gate = StepGate(at=21)
    engine = await launch(model, kv_policy=kv_policy, on_tokens=gate)
    assert isinstance(engine, SharesDevice)
    prompt = make_prompt(30)
    running = asyncio.ensure_future(engine.generate(make_request(prompt, max_new_tokens=TOKENS)))
    await gate.run(engine.release())
    there = engine.health().generated_tokens
    await engine.update(WeightUpdate.full(named_weights(newer), 1))
    assert engine.version == 1, "orders that need this version may come"
    waiting = asyncio.ensure_future(engine.generate(make_request(make_prompt(9, 1), max_new_tokens=5)))
    await until(lambda: engine.health().waiting == 1)
    assert engine.health().generated_tokens == there, "nothing is computed without memory"
    await engine.restore(WeightUpdate.full(named_weights(newer), 1))
    generation, other = await running, await waiting
    assert [segment.weight_version for segment in generation.segments] == [0, 1]
    assert not any(segment.mixed_cache for segment in generation.segments), "the cache is computed again"
    assert len(generation.token_ids) == TOKENS and generation.finish_reason is FinishReason.LENGTH
    assert max_gap(newer, prompt, generation, generation.segments[1]) <= TOLERANCE
    assert max_gap(newer, make_prompt(9, 1), other, other.segments[0]) <= TOLERANCE
    assert max_gap(model, prompt, generation, generation.segments[0]) <= TOLERANCE


async def test_scores_wait_for_the_memory_and_cancelled_requests_do_not(launch: Launch) -> None:
    model = build_model("qwen3", tied=True)
    weights = {name: weight.clone() for name, weight in named_weights(model).items()}
    gate = StepGate(at=1)
    engine = await launch(model, on_tokens=gate)
    ids = torch.tensor(make_prompt(20)).numpy()
    request = ScoreRequest(
        request_id="s", token_ids=ids, positions=torch.arange(1, 20).numpy(), temperatures=torch.ones(19).numpy()
    )
    expected = await engine.score(request)
    running = asyncio.ensure_future(engine.generate(make_request(make_prompt(5), max_new_tokens=TOKENS)))
    await gate.run(engine.release())
    score = asyncio.ensure_future(engine.score(request))
    running.cancel()
    await until(lambda: engine.health().running == 0)
    assert not score.done()
    await engine.restore(WeightUpdate.full(weights, 0))
    assert (await score).tolist() == expected.tolist()


async def test_weights_of_another_model_do_not_end_the_wait(launch: Launch) -> None:
    model = build_model("qwen3", tied=False)
    weights = {name: weight.clone() for name, weight in named_weights(model).items()}
    engine = await launch(model)
    await engine.release()
    wrong = dict(list(weights.items())[:-1])
    with pytest.raises(ModelMismatchError):
        await engine.restore(WeightUpdate.full(wrong, 1))
    await engine.restore(WeightUpdate.full(weights, 1))
    generation = await engine.generate(make_request(make_prompt(5), max_new_tokens=5))
    assert generation.segments[0].weight_version == 1


async def test_the_memory_of_weights_and_cache_goes_back_to_the_system() -> None:
    """2 x 64 MiB of cache, of which all pages are touched; measured as resident memory of this process."""
    model = build_model("qwen3", tied=True)
    weights = {name: weight.clone() for name, weight in named_weights(model).items()}
    engine = TorchEngine(model, num_slots=8, context_length=128)
    await engine.start()
    cache = engine._core.decoder.cache.kv.fill_(1.0)
    size = cache.nbytes
    held = _resident()
    await engine.release()
    assert held - _resident() > 0.8 * size
    await engine.restore(WeightUpdate.full(weights, 0))
    assert cache.isfinite().all(), "masked positions must be finite"
    await engine.stop()


def _resident() -> int:
    text = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Rss:"))
