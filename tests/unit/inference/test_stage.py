"""The staged file is a safetensors file of one version, written in place."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from services.common.errors import ConfigError, InfrastructureError
from services.common.records import Sampling
from services.common.weights.codec import ChunkChange
from services.inference.engine.base import FinishReason, GenerationRequest, WeightUpdate
from services.inference.engine.served import stage
from services.inference.engine.served.client import VersionSpan
from services.inference.engine.served.engine import CallOutput, RequestState
from services.inference.engine.served.stage import FILE, Stage, place_stage, size_of


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
