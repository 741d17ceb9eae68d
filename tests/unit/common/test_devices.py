"""A missing device is an error with its remedy, not an exception of PyTorch."""

from __future__ import annotations

import pytest
import torch

from services.common.errors import ConfigError
from services.common.system.devices import chosen_device


@pytest.mark.parametrize(("built", "told"), [(None, "built without CUDA"), ("12.8", "CUDA_VISIBLE_DEVICES")])
def test_cuda_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch, built: str | None, told: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built)
    with pytest.raises(ConfigError, match=told) as caught:
        chosen_device("cuda", "inference.a.device")
    assert caught.value.message.startswith("inference.a.device is cuda, but ")
    assert (chosen_device("auto", "x"), chosen_device("cpu", "x")) == ("cpu", "cpu")


def test_a_gpu_that_is_there_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [chosen_device(wanted, "x") for wanted in ("auto", "cuda", "cpu")] == ["cuda", "cuda", "cpu"]
