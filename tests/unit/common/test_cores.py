"""Cores are those that the process may use, not those of the machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.common.system.machine import num_cores


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", 8), ("200000 100000", 2), ("150000 100000", 1.5), ("1600000 100000", 8), ("", 8)],
)
def test_a_containers_share_of_time_counts_as_cores(
    quota: str, cores: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    (tmp_path / "cpu.max").write_text(quota)
    assert num_cores(tmp_path / "cpu.max") == cores
    assert num_cores(tmp_path / "none") == 8
