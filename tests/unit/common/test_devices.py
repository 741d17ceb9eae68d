"""A missing device is an error with its remedy, not an exception of PyTorch."""

from __future__ import annotations

import pytest
import torch

from services.common.config.base import with_device
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


def test_a_driver_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12020).")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", refuse)
    with pytest.raises(
        ConfigError, match=r"driver on your system is too old.*install a CUDA build that the driver supports"
    ):
        chosen_device("cuda", "inference.a.device")


@pytest.mark.parametrize(
    ("written", "filled"),
    [
        ({}, {}),
        ({"device": "auto"}, {"device": "auto"}),
        ({"device": "cpu"}, {"device": "cpu", "dtype": "float32"}),
        ({"device": "cpu", "gpus": [0]}, {"device": "cpu", "gpus": [0], "dtype": "float32"}),
        ({"gpus": [1]}, {"device": "cuda", "gpus": [1], "dtype": "bfloat16"}),
        ({"device": "cuda", "dtype": "auto"}, {"device": "cuda", "dtype": "bfloat16"}),
        ({"device": "cuda", "dtype": "float32"}, {"device": "cuda", "dtype": "float32"}),
        ({"device": ["cuda"]}, {"device": ["cuda"]}),
        ("cuda", "cuda"),
    ],
)
def test_types_follow_from_the_device_as_soon_as_it_is_known(written: object, filled: object) -> None:
    assert with_device(written, {"dtype": "bfloat16"}, {"dtype": "float32"}) == filled
