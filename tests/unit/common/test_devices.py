"""A missing device is an error with its remedy, not an exception of PyTorch."""

from __future__ import annotations

import pytest
import torch

from services.common.config.base import with_device
from services.common.errors import ConfigError
from services.common.system.devices import VARIABLE, chosen_device, inside, mapped_gpus, visible_gpus


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


# -- numbers of a recipe count among the GPUs that CUDA_VISIBLE_DEVICES shows


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("0,1", ["0", "1"]),
        (" 6 , 7 ", ["6", "7"]),
        ("GPU-4f1a,MIG-9b", ["GPU-4f1a", "MIG-9b"]),
        ("", []),
        ("-1", []),
        ("2,-1,3", ["2"]),
        ("NoDevFiles", ["NoDevFiles"]),
    ],
)
def test_the_variable_is_read_as_cuda_reads_it(value: str, shown: list[str]) -> None:
    assert visible_gpus({VARIABLE: value}) == shown


def test_without_the_variable_numbers_are_those_of_the_machine() -> None:
    assert visible_gpus({}) is None
    assert mapped_gpus([4, 6], {}, "x") == ["4", "6"]
    assert inside({"PATH": "/bin"}, {VARIABLE: "4,6"}, "x") == {"PATH": "/bin", VARIABLE: "4,6"}


def test_a_process_gets_its_share_of_what_the_environment_shows() -> None:
    made = inside({VARIABLE: "4,GPU-77,6,7"}, {VARIABLE: "1,3", "OMP_NUM_THREADS": "1"}, "trainer-model0")
    assert made == {VARIABLE: "GPU-77,7", "OMP_NUM_THREADS": "1"}


def test_a_process_without_gpus_of_its_own_sees_what_the_environment_shows() -> None:
    assert inside({VARIABLE: "4,5"}, {"A": "b"}, "x")[VARIABLE] == "4,5"


@pytest.mark.parametrize(("outer", "told"), [("4,5", "shows 2 GPUs"), ("", "write no GPU"), ("-1", "shows 0 GPUs")])
def test_a_number_beyond_what_is_shown_is_refused_with_the_numbers_to_write(outer: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        inside({VARIABLE: outer}, {VARIABLE: "2"}, "inference-a")
    assert "inference-a takes GPU 2" in caught.value.message and "unset the variable" in caught.value.message
