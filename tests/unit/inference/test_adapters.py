"""The torch engine serves an adapter on a shared base with the log-probabilities of PEFT, before, across and after a swap."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from services.common.config.loading import validate
from services.common.config.training import AdapterConfig
from services.common.errors import ModelMismatchError
from services.common.lora import identity_of, initial_adapter, target_modules
from services.common.rpc.run_client import RunSettings
from services.common.weights.snapshot import PEFT_PREFIX, A, B
from services.inference import loading
from services.inference.engine.base import WeightUpdate
from services.inference.engine.torch.blocks import Adapter
from services.inference.engine.torch.engine import TorchEngine
from services.inference.loading import replica_config
from tests.integration.inference.peers import scripted_recipe
from tests.random_models import TOLERANCE, build_model, make_prompt, make_request, max_gap
from tests.unit.inference.conftest import StepGate
from tests.unit.inference.test_loading import SmallTokenizer

CONFIG = AdapterConfig(rank=4, alpha=8.0)
CONTEXT = 600


def version(model: Any, number: int, config: AdapterConfig = CONFIG) -> dict[str, torch.Tensor]:
    """An adapter with values of that number; version 0 computes as the base does."""
    tensors = initial_adapter(model, config, seed=1)
    if number:
        generator = torch.Generator().manual_seed(number)
        tensors = {
            name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator) for name, tensor in tensors.items()
        }
    return tensors


def with_peft(model: Any, tensors: dict[str, torch.Tensor], config: AdapterConfig = CONFIG) -> Any:
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

    made = get_peft_model(
        copy.deepcopy(model),
        LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=config.targets, task_type="CAUSAL_LM"),
    )
    assert not set_peft_model_state_dict(made, tensors).unexpected_keys
    return made.eval()


@torch.no_grad()
def merged(model: Any, tensors: dict[str, torch.Tensor], config: AdapterConfig = CONFIG) -> Any:
    """A plain model with W + alpha / rank B A."""
    made = copy.deepcopy(model)
    for name, module in target_modules(made, config).items():
        low, high = (tensors[f"{PEFT_PREFIX}{name}.{factor}"] for factor in (A, B))
        module.weight += config.alpha / config.rank * high @ low
    return made


ORACLES = {"merged": merged, "peft": with_peft}
ORACLE_PARAMETERS = ["merged", pytest.param("peft", marks=pytest.mark.needs("peft"))]


def engine_on(
    model: Any, tensors: dict[str, torch.Tensor], config: AdapterConfig = CONFIG, **settings: Any
) -> TorchEngine:
    scale = identity_of(model, config, "").scale
    return TorchEngine(
        model, num_slots=2, context_length=CONTEXT, adapter=Adapter(tensors=tensors, scale=scale), **settings
    )


@pytest.mark.parametrize("oracle", ORACLE_PARAMETERS)
@pytest.mark.usefixtures("each_decoder")
@pytest.mark.parametrize(
    "config", [CONFIG, AdapterConfig(rank=3, alpha=12.0, targets=["k_proj", "up_proj", "o_proj"])], ids=["all", "some"]
)
async def test_log_probabilities_are_those_of_peft_before_across_and_after_a_swap(
    config: AdapterConfig, oracle: str
) -> None:
    base = build_model("qwen3")
    oracles = [ORACLES[oracle](base, version(base, number, config), config) for number in range(2)]
    gate = StepGate(at=100)  # 60 steps into the second generation
    engine = engine_on(build_model("qwen3"), version(base, 0, config), config, on_tokens=gate)
    await engine.start()
    prompt = make_prompt(30)
    first = await engine.generate(make_request(prompt, max_new_tokens=40))
    assert max_gap(oracles[0], prompt, first, first.segments[0]) <= TOLERANCE
    assert max_gap(base, prompt, first, first.segments[0]) <= TOLERANCE, "version 0 is the base"
    pending = asyncio.ensure_future(engine.generate(make_request(prompt, seed=3, max_new_tokens=300)))
    await gate.run(engine.update(WeightUpdate.full(version(base, 1, config), 1)))
    across = await pending
    before, after = across.segments
    assert (before.weight_version, after.weight_version) == (0, 1)
    assert max_gap(oracles[0], prompt, across, before) <= TOLERANCE
    assert max_gap(oracles[1], prompt, across, after) <= TOLERANCE
    assert max_gap(oracles[0], prompt, across, after) > 100 * TOLERANCE, "the test would notice the old adapter"
    later = await engine.generate(make_request(prompt, max_new_tokens=40))
    assert [segment.weight_version for segment in later.segments] == [1]
    assert max_gap(oracles[1], prompt, later, later.segments[0]) <= TOLERANCE
    await engine.stop()


@pytest.mark.usefixtures("each_decoder")
async def test_two_engines_on_one_base_do_not_touch_it_or_each_other() -> None:
    base, plain = build_model("qwen3"), build_model("qwen3")
    engines = [engine_on(base, version(base, 0)), engine_on(base, version(base, 0))]
    layers = [engine._core.decoder.blocks.layers for engine in engines]
    for one, other in zip(*layers, strict=True):
        assert one.qkv.data_ptr() == other.qkv.data_ptr() and one.gate_up.data_ptr() == other.gate_up.data_ptr()
    for engine, number in zip(engines, (1, 2), strict=True):
        await engine.start()
        await engine.update(WeightUpdate.full(version(plain, number), number))
    prompt = make_prompt(25)
    found = await asyncio.gather(*(e.generate(make_request(prompt, max_new_tokens=60)) for e in engines))
    for generation, number in zip(found, (1, 2), strict=True):
        assert max_gap(merged(plain, version(plain, number)), prompt, generation, generation.segments[0]) <= TOLERANCE
    for (name, left), right in zip(base.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(left, right), name
    for engine in engines:
        await engine.stop()


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (
            AdapterConfig(rank=2, alpha=8.0),
            r"other shape: .*q_proj.lora_A.weight has shape \(2, 64\), the model \(4, 64\)",
        ),
        (AdapterConfig(rank=4, alpha=8.0, targets=["q_proj"]), r"missing: .*k_proj.lora_A.weight"),
    ],
)
async def test_an_engine_refuses_an_adapter_of_another_rank_or_target(other: AdapterConfig, says: str) -> None:
    model = build_model("qwen3")
    engine = engine_on(model, version(model, 0))
    await engine.start()
    with pytest.raises(ModelMismatchError, match=says):
        await engine.update(WeightUpdate.full(version(model, 1, other), 1))
    assert engine.version == 0
    await engine.stop()


def test_an_adapter_outside_the_decoder_is_refused() -> None:
    model = build_model("qwen3")
    stray = {"base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight": torch.zeros(4, 64)}
    with pytest.raises(ModelMismatchError, match=r"cannot apply the adapter of model.layers.9.self_attn.q_proj.lora_A"):
        TorchEngine(model, num_slots=1, context_length=64, adapter=Adapter(tensors=stray, scale=1.0))


def recipe_of(path: Path, **adapters: Any) -> Any:
    policy = {"model": {"path": str(path), "context_length": 2048}, "trainer": {"port": 0}}
    policy |= {"weights": {"publish_dtype": "float32", "port": 0}}
    return scripted_recipe(
        policies={name: {**policy, "adapter": adapter} for name, adapter in adapters.items()},
        inference={"a": {"engine": "torch", "port": 0, "num_slots": 1, "device": "cpu", "dtype": "float32"}},
        rollout={"policies": "apart"} if len(adapters) > 1 else {},
    )


@pytest.fixture
def base_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    build_model("qwen3").save_pretrained(tmp_path)
    monkeypatch.setattr("services.common.text.chat.load_tokenizer", lambda path: SmallTokenizer())
    return tmp_path


def test_policies_with_adapters_share_one_loaded_base(base_path: Path) -> None:
    recipe = recipe_of(base_path, one={"rank": 4, "alpha": 8}, two={"rank": 2, "alpha": 8, "targets": ["q_proj"]})
    settings = RunSettings("r", base_path, validate(recipe, source="test"))
    threads = torch.get_num_threads()
    config = replica_config(settings.recipe, "a")
    loaded = [loading.load_policy(name, settings, config, lambda count, at: None) for name in ("one", "two")]
    torch.set_num_threads(threads)
    engines: list[Any] = [each.served.engine for each in loaded]
    shared = [engine._core.decoder.embedding.data_ptr() for engine in engines]
    assert shared[0] == shared[1]
    assert [len(engine._core.decoder.weights) for engine in engines] == [2 * 2 * 7, 2 * 2]
    held = [each.weights.held() for each in loaded]
    assert [version.number for version in held] == [0, 0] and held[0].digest != held[1].digest
