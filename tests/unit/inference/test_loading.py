"""A loaded policy computes with the published values from the first token on, and takes deltas on them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from services.common.config.loading import validate
from services.common.errors import ConfigError, ModelMismatchError
from services.common.rpc.run_client import RunSettings
from services.inference import loading
from services.inference.engine.base import ByteTokenizer, GenerationRequest
from services.inference.engine.streaming import StreamingEngine
from services.inference.loading import replica_config
from tests.integration.inference.peers import scripted_recipe
from tests.random_models import build_model
from tests.unit.trainer_service.building import save_model


class SmallTokenizer(ByteTokenizer):
    def __len__(self) -> int:
        return 258


@pytest.mark.parametrize("engine", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("published", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("master", ["float32", "bfloat16"])
def test_the_engine_starts_with_the_published_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, master: str, published: str, engine: str
) -> None:
    model = build_model("qwen3")
    model.save_pretrained(tmp_path)
    monkeypatch.setattr("services.common.text.chat.load_tokenizer", lambda path: SmallTokenizer())
    recipe: dict[str, Any] = scripted_recipe(
        policies={
            "model0": {
                "model": {"path": str(tmp_path), "context_length": 2048},
                "trainer": {"master_dtype": master},
                "weights": {"publish_dtype": published},
            }
        },
        inference={"a": {"engine": "torch", "port": 0, "num_slots": 1, "device": "cpu", "dtype": engine}},
    )
    settings = RunSettings("r", tmp_path, validate(recipe, source="test"))
    threads = torch.get_num_threads()
    loaded = loading.load_policy("model0", settings, replica_config(settings.recipe, "a"), lambda count, at: None)
    torch.set_num_threads(threads)
    own: Any = loaded.served.engine
    types = [getattr(torch, name) for name in (master, published, engine)]
    for name, tensor in model.named_parameters():
        expected = tensor.detach()
        for dtype in types:
            expected = expected.to(dtype)
        held = own._core.decoder.weights[name]
        assert held.dtype == types[-1] and torch.equal(held, expected), name
    assert loaded.weights.held().number == 0


def test_a_replica_logs_its_device_and_never_leaves_the_gpus_that_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model = {"path": str(save_model(tmp_path / "model")), "context_length": 64}

    def load(**engine: Any) -> Any:
        recipe = scripted_recipe(
            policies={"model0": {"model": model}},
            inference={"a": {"engine": "torch", "port": 0, "num_slots": 1, **engine}},
        )
        settings = RunSettings("r", tmp_path, validate(recipe, source="test"))
        with capture_logs() as logs:
            loading.load_policy("model0", settings, replica_config(settings.recipe, "a"), lambda count, at: None)
        return [(each["device"], each["dtype"]) for each in logs if each["event"] == "device.chosen"]

    assert load() == [("cpu", "float32")]
    assert load(dtype="bfloat16") == [("cpu", "bfloat16")]
    with pytest.raises(ConfigError, match="the device of the inference service of model0 is cuda, but PyTorch"):
        load(gpus=[0])


def test_a_teacher_with_another_vocabulary_is_refused_before_any_weights_are_loaded(tmp_path: Path) -> None:
    student, teacher = save_model(tmp_path / "student"), save_model(tmp_path / "teacher", vocabulary=29)
    (student / "model.safetensors").unlink()
    recipe: dict[str, Any] = scripted_recipe(
        policies={
            "model0": {
                "model": {"path": str(student), "context_length": 64},
                "algorithm": {"name": "reinforce", "distillation": {"teacher": "large"}},
                "batch": {"dynamic_sampling": False},
            },
            "large": {"trained": False, "model": {"path": str(teacher), "context_length": 64}},
        },
        sampling={"max_new_tokens": 16},
        inference={"a": {"engine": "torch", "port": 0, "num_slots": 1, "device": "cpu"}},
    )
    settings = RunSettings("r", tmp_path, validate(recipe, source="test"))
    with pytest.raises(ModelMismatchError, match="the teacher large of model0: 31 tokens here, 29 there"):
        loading.load_policy("model0", settings, replica_config(settings.recipe, "a"), lambda count, at: None)


async def test_without_weights_an_untrained_policy_is_at_version_0_from_the_start(tmp_path: Path) -> None:
    """Version 0 is not announced: the first replica reports its version."""
    recipe = scripted_recipe()
    ((name, section),) = recipe["policies"].items()
    recipe["policies"] = {name: section, "partner": {**section, "trained": False}}
    settings = RunSettings("r", tmp_path, validate(recipe, source="test"))
    for policy, number in ((name, -1), ("partner", 0)):
        loaded = loading.load_policy(policy, settings, replica_config(settings.recipe, "a"), lambda count, at: None)
        assert (loaded.weights.held().number, loaded.served.engine.version) == (number, number)
        assert bool(loaded.weights.held().digest) == (number == 0)


def test_a_machine_that_does_not_see_the_run_gets_a_directory_that_nobody_else_has_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = validate(scripted_recipe(), source="test")
    settings = RunSettings(run_id="r1", run_dir=tmp_path / "elsewhere", recipe=recipe)
    monkeypatch.setattr(loading.tempfile, "tempdir", str(tmp_path))
    own = loading.private_directory(settings)
    assert own.stat().st_mode & 0o777 == 0o700 and loading.private_directory(settings) == own
    own.rmdir()
    own.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="belongs to another user"):
        loading.private_directory(settings)


class OfTheUser(StreamingEngine):
    """Has the weights of its policy."""

    async def tokens(self, request: GenerationRequest) -> AsyncIterator[tuple[int, float]]:
        yield 0, 0.0


class Incomplete:
    def __init__(self, setup: Any) -> None: ...

    async def generate(self, request: Any) -> Any: ...


def test_an_engine_by_import_path_gets_the_published_weights_and_its_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_model("qwen3")
    model.save_pretrained(tmp_path)
    monkeypatch.setattr("services.common.text.chat.load_tokenizer", lambda path: SmallTokenizer())
    engine = {"engine": f"{__name__}:OfTheUser", "engine_settings": {"url": "here"}, "num_slots": 3, "port": 0}
    recipe: dict[str, Any] = scripted_recipe(
        policies={
            "model0": {
                "model": {"path": str(tmp_path), "context_length": 2048},
                "weights": {"publish_dtype": "bfloat16"},
            }
        },
        inference={"a": engine},
    )
    settings = RunSettings("r", tmp_path, validate(recipe, source="test"))
    loaded = loading.load_policy("model0", settings, replica_config(settings.recipe, "a"), lambda count, at: None)
    own = loaded.served.engine
    assert isinstance(own, OfTheUser) and loaded.relay is not None
    assert (own.setup.num_slots, own.setup.settings, own.setup.model_path) == (3, {"url": "here"}, str(tmp_path))
    assert loaded.weights.held().number == own.version == 0
    for name, tensor in model.named_parameters():
        assert torch.equal(own.setup.weights[name], tensor.detach().to(torch.bfloat16)), name


def test_an_engine_without_a_method_is_refused_with_its_line(tmp_path: Path) -> None:
    recipe: dict[str, Any] = scripted_recipe(inference={"a": {"engine": f"{__name__}:Incomplete", "port": 0}})
    settings = RunSettings("r", tmp_path, validate(recipe, source="test"))
    told = rf"{__file__}:\d+: the class engine .*Incomplete lacks methods: write `async def start\(self\)`, .*health"
    with pytest.raises(ConfigError, match=told):
        loading.load_policy("model0", settings, replica_config(settings.recipe, "a"), lambda count, at: None)
