"""The staged file is a safetensors file of one version, written in place."""

from __future__ import annotations

import base64
import inspect
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.multiprocessing import reductions

from services.common.errors import ConfigError, InfrastructureError
from services.common.records import Sampling
from services.common.weights.codec import ChunkChange
from services.inference.engine import sglang_tensors
from services.inference.engine.base import FinishReason, GenerationRequest, WeightUpdate
from services.inference.engine.served import stage
from services.inference.engine.served.client import Refused, VersionSpan
from services.inference.engine.served.engine import CallOutput, RequestState
from services.inference.engine.served.stage import FILE, Stage, place_stage, size_of
from services.inference.engine.sglang_tensors import DEVICE_PLACE, on_device


def tensors(seed: int = 0, dtype: Any = torch.bfloat16) -> dict[str, Any]:
    random = torch.Generator().manual_seed(seed)
    return {
        "model.embed": torch.randn(7, 5, generator=random).to(dtype),
        "model.norm": torch.randn(3, generator=random).to(dtype),
        "model.head": torch.randn(2, 4, 6, generator=random).to(dtype),
    }


def read(stage: Stage) -> dict[str, Any]:
    loaded: dict[str, Any] = load_file(stage.directory / FILE)
    return loaded


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_safetensors_reads_back_what_was_staged_to_the_bit(tmp_path: Path, dtype: Any) -> None:
    wanted = tensors(dtype=dtype)
    found = read(Stage(tmp_path / "stage", wanted, 0))
    assert list(found) != [] and {name: value.dtype for name, value in found.items()} == dict.fromkeys(wanted, dtype)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_changed_elements_and_whole_tensors_become_the_next_version(tmp_path: Path) -> None:
    old, new = tensors(0), tensors(1)
    stage = Stage(tmp_path / "stage", old, 0)
    position = np.array([4, 11])
    bits = new["model.embed"].view(torch.int16).numpy().view(np.uint16).reshape(-1)
    change = ChunkChange(start=3, positions=position, values=bits[3 + position], num_changes=2)
    stage.write(
        WeightUpdate(
            version=1,
            whole={"model.head": new["model.head"]},
            changes={"model.embed": [change]},
            dtype="bfloat16",
            complete=False,
        )
    )
    wanted = old | {"model.head": new["model.head"], "model.embed": old["model.embed"].clone()}
    wanted["model.embed"].view(-1)[3 + position] = new["model.embed"].view(-1)[3 + position]
    assert stage.version == 1
    assert all(torch.equal(value, wanted[name]) for name, value in read(stage).items())


def test_a_write_that_broke_off_is_healed_by_every_tensor_alone(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "stage", tensors(), 0)

    class Gone:
        shape, dtype = (3,), torch.bfloat16

        def detach(self) -> Any:
            raise MemoryError

    with pytest.raises(MemoryError):
        stage.write(WeightUpdate.full(tensors(1) | {"model.norm": Gone()}, 1))
    assert (stage.version, stage.dirty) == (0, True)
    with pytest.raises(InfrastructureError, match="every tensor"):
        stage.write(WeightUpdate(version=1, whole={"model.norm": torch.zeros(3)}, complete=False))
    stage.write(WeightUpdate.full(tensors(2), 2))
    assert (stage.version, stage.dirty) == (2, False)
    assert all(torch.equal(value, tensors(2)[name]) for name, value in read(stage).items())


def test_the_place_has_room_or_says_what_to_do(tmp_path: Path) -> None:
    assert size_of(tensors()) == 2 * (35 + 3 + 48)
    place = place_stage(tmp_path, "a-model0", 1000)
    assert place.name == f"rollmill-stage-{os.getpid()}-a-model0"
    with pytest.raises(ConfigError, match=r"no room for the .* GiB .*write a run\.dir"):
        place_stage(tmp_path, "x", 1 << 60)


def test_stages_of_processes_that_are_gone_are_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, own = tmp_path / "rollmill-stage-999999999-a", tmp_path / f"rollmill-stage-{os.getpid()}-b"
    old.mkdir()
    own.mkdir()
    monkeypatch.setattr(stage, "SHARED_MEMORY", tmp_path)
    place_stage(tmp_path, "c", 10)
    assert not old.exists() and own.exists()


def test_a_stage_is_for_its_owner_alone_and_never_writes_where_somebody_points(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "stage", tensors(), 0)
    assert stage.directory.stat().st_mode & 0o777 == 0o700
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        Stage(tmp_path / "link", tensors(), 0)
    assert list((tmp_path / "elsewhere").iterdir()) == []


# -- State of a request: one budget, segments by version, stop tokens forbidden as long as they must be.


def state(*, room: int = 1000, stop: tuple[int, ...] = (9,), **sampling: Any) -> RequestState:
    request = GenerationRequest(
        request_id="r", prompt_ids=(1, 2, 3), sampling=Sampling(**sampling), stop_token_ids=stop
    )
    return RequestState(request, room)


def output(*tokens: int) -> CallOutput:
    return CallOutput(tokens=list(tokens), logprobs=[-float(token) for token in tokens])


def spans(*bounds: tuple[int, int, int]) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(version=version, start=start, end=end) for version, start, end in bounds)


def test_a_leg_cut_short_keeps_the_spans_of_what_is_left() -> None:
    it, cut = state(max_new_tokens=50), output(4, 5, 6, 7)
    cut.cut = 3
    cut.cut_off()
    it.take(cut, spans((0, 0, 2), (1, 2, 9)), mixed_from=None)
    assert [(s.weight_version, s.num_tokens) for s in it.generation(FinishReason.STOP).segments] == [(0, 2), (1, 1)]


@pytest.mark.parametrize("told", [(), ((0, 0, 1),), ((0, 0, 1), (1, 2, 3)), ((0, 1, 3),)])
def test_tokens_without_a_version_are_refused(told: tuple[tuple[int, int, int], ...]) -> None:
    it = state(max_new_tokens=50)
    with pytest.raises(InfrastructureError, match="which weights"):
        it.take(output(4, 5, 6), spans(*told), mixed_from=None)
    assert it.tokens == []


def test_a_request_has_ended_with_its_stop_token_whatever_the_server_said() -> None:
    it = state(max_new_tokens=50)
    it.take(output(4, 9), spans((0, 0, 2)), mixed_from=None)
    assert it.ended() is FinishReason.STOP


# -- Weights as handles of tensors: their values, their pickle, and the number of the device.


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
    monkeypatch.setattr(sglang_tensors, "BUCKET_BYTES", 512)
    values = {name: torch.randn(40, 2) for name in "abc"}
    stage = Stage(tmp_path / "stage", values, 0)
    client: Any = Client(("cpu", "cpu"), left_open=True)
    transfer = sglang_tensors.TensorTransfer(stage)
    assert await transfer.load(client, 7, flush=True) == ""
    assert client.calls == [("end",), (2, 7, False), (2, 7, False), (2, 7, True), ("end",)]
    assert all(torch.equal(client.read[name], value) for name, value in values.items())
    stage.write(WeightUpdate.full({name: value + 1 for name, value in values.items()}, 8))
    await transfer.load(client, 8, flush=False)
    assert all(torch.equal(client.read[name], value + 1) for name, value in values.items())
    assert not any(flush for *_, flush in client.calls[5:-1])
