"""Every setting of the section ``trainer`` reaches the object that it is for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from structlog.testing import capture_logs

from services.common.errors import ConfigError
from services.trainer.app import build_step, join_ranks
from services.trainer.model.attention import Documents, register_attention
from services.trainer.model.logprobs import Targets
from services.trainer.model.optimizer import MomentsOnHost
from services.trainer.model.policy_model import PolicyModel
from services.trainer.ranks import Ranks
from services.trainer.step import TrainStep
from tests.unit.trainer.building import rank_batch, training_sequences
from tests.unit.trainer_service.building import POLICY, recipe, save_model

KL = {"name": "ppo_clip", "kl_coefficient": 0.1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), tied=False)


@pytest.fixture
def group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def built(model: Path, **trainer: Any) -> tuple[TrainStep, PolicyModel]:
    """The step and its reference model."""
    run = recipe(model, trainer=trainer, algorithm=KL)
    ranks = Ranks.single() if dist.is_initialized() else join_ranks(run, POLICY)
    step, _ = build_step(run, POLICY, str(model), ranks)
    assert step.reference is not None
    return step, step.reference


def is_checkpointed(model: PolicyModel) -> bool:
    """Whether a layer computes its forward pass a second time for the backward pass."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return False
    calls: list[int] = []
    hook = model.layers[0].get_submodule("mlp").register_forward_pre_hook(lambda *_: calls.append(1))
    tokens = torch.arange(4, device=next(model.parameters()).device)
    documents = Documents.from_offsets(np.array([0, 4]), tokens.device)
    model(tokens, tokens, documents, Targets.at(tokens[1:], tokens), 1.0)[0].sum().backward()
    hook.remove()
    model.zero_grad()
    return len(calls) == 2


def test_the_settings_of_the_model_reach_policy_and_reference(model: Path, group: None) -> None:
    step, reference = built(model, attention="sdpa", token_budget=40, gradient_checkpointing=True, threads=1)
    for built_model in (step.model, reference):
        assert built_model.causal_lm.config._attn_implementation == register_attention("sdpa")
    assert step.max_tokens == 40
    assert is_checkpointed(step.model) and not is_checkpointed(reference)


def test_a_trainer_logs_its_device_and_type_and_auto_follows_from_the_device(model: Path, group: None) -> None:
    with capture_logs() as logs:
        step, _ = built(model, device="auto")
    on_gpu = torch.cuda.is_available()
    (told,) = [each for each in logs if each["event"] == "device.chosen"]
    assert told["dtype"] == ("bfloat16" if on_gpu else "float32") and told["device"].startswith(
        "cuda" if on_gpu else "cpu"
    )
    assert is_checkpointed(step.model) is on_gpu


def test_a_trainer_that_names_gpus_does_not_fall_back_to_the_cpu(
    model: Path, monkeypatch: pytest.MonkeyPatch, group: None
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"policies\.model0\.trainer\.device is cuda, but PyTorch"):
        built(model, gpus=[0], device="auto")


def test_precision_and_places_reach_weights_moments_and_reference(model: Path, group: None) -> None:
    step, reference = built(model, compute_dtype="bfloat16", offload=["optimizer", "reference"])
    assert {p.dtype for p in step.model.parameters()} == {torch.float32}
    assert {p.dtype for p in reference.parameters()} == {torch.bfloat16}
    assert isinstance(step.optimizer._step.__self__, MomentsOnHost)  # type: ignore[attr-defined]
    assert step.run(rank_batch(training_sequences(8))).updates_applied == 1
