"""Weights as handles of tensors: their values, their pickle, and the number of the device."""

from __future__ import annotations

import base64
import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

from extras.sglang import tensors
from extras.sglang.tensors import DEVICE_PLACE, on_device
from services.inference.engine.base import WeightUpdate
from services.inference.engine.served.client import Refused
from services.inference.engine.served.stage import Stage


def test_the_device_of_a_handle_is_the_rank_of_its_reader() -> None:
    """By its place among torch's own arguments, so that another torch that moves it fails here, without a GPU."""
    parameters = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    assert parameters[DEVICE_PLACE] == "storage_device"
    arguments = tuple(range(len(parameters)))
    rebuild, moved = on_device((reductions.rebuild_cuda_tensor, arguments), 99)
    assert rebuild is reductions.rebuild_cuda_tensor
    assert [place for place, value in enumerate(moved) if value != arguments[place]] == [DEVICE_PLACE]
    assert moved[DEVICE_PLACE] == 99 and len(moved) == len(parameters)


class Client:
    """Reads handles as a server does; refuses the first session if one was left open."""

    def __init__(self, devices: tuple[str, ...], *, left_open: bool = False) -> None:
        self.devices = devices
        self.calls: list[tuple[object, ...]] = []
        self.read: dict[str, torch.Tensor] = {}
        self._open = left_open

    async def begin_update(self) -> None:
        if self._open:
            raise Refused("a session is open", 400)
        self._open = True

    async def end_update(self) -> None:
        self.calls.append(("end",))
        self._open = False

    async def update_from_tensors(self, payloads: list[str], version: int, *, flush: bool) -> None:
        assert self._open
        self.calls.append((len(payloads), version, flush))
        for payload in payloads:
            rows = pickle.loads(base64.b64decode(payload))  # noqa: S301 - made here
            self.read |= {name: tensor.clone() for name, tensor in rows}


async def test_every_rank_gets_every_bucket_and_the_cache_is_flushed_with_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors, "BUCKET_BYTES", 512)
    values = {name: torch.randn(40, 2) for name in "abc"}
    stage = Stage(tmp_path / "stage", values, 0)
    client: Any = Client(("cpu", "cpu"), left_open=True)
    transfer = tensors.TensorTransfer(stage)
    assert await transfer.load(client, 7, flush=True) == ""
    assert client.calls == [("end",), (2, 7, False), (2, 7, False), (2, 7, True), ("end",)]
    assert all(torch.equal(client.read[name], value) for name, value in values.items())
    stage.write(WeightUpdate.full({name: value + 1 for name, value in values.items()}, 8))
    await transfer.load(client, 8, flush=False)
    assert all(torch.equal(client.read[name], value + 1) for name, value in values.items())
    assert not any(flush for *_, flush in client.calls[5:-1])
