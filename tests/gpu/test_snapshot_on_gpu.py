"""Snapshots of a model on a GPU have the bytes of the same model on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.common.weights.snapshot import Snapshot
from services.trainer import publish
from services.trainer.model.policy_model import build_policy_model
from services.trainer.publish import HostCopier, Snapshots
from services.trainer.ranks import Ranks
from tests.unit.trainer.building import tiny_causal_lm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.needs("CUDA"),
]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_model_on_a_gpu_is_published_as_on_the_cpu(tmp_path: Path, dtype: str) -> None:
    data = []
    for device in ("cpu", "cuda"):
        ranks = Ranks.single(device)
        model = build_policy_model(tiny_causal_lm(), ranks)
        directory = tmp_path / device
        directory.mkdir()
        written = Snapshots(model, ranks, run_id="r", policy="p", dtype=dtype, directories=[directory]).write(1)
        assert written is not None
        data.append(Snapshot(written.path).data)
    assert data[0] == data[1]


def test_tensors_larger_than_the_pinned_buffers_arrive_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "_STAGED_BYTES", 1 << 12)
    copier = HostCopier(torch.device("cuda"))
    sources = [torch.randn(size, device="cuda") for size in (1, 5000, 2048, 0, 100_003)]
    targets = [torch.empty(len(source), dtype=torch.bfloat16) for source in sources]
    copier.copy(zip(sources, targets, strict=True))
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(source.cpu().to(torch.bfloat16), target)
