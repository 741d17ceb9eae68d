from __future__ import annotations

import contextlib
import errno
import math
import os
from pathlib import Path
from typing import Any

import pytest

from services.orchestrator.state.disk_forecast import (
    LEAST_S,
    SAMPLE_S,
    WINDOW_S,
    DiskForecast,
    DiskOutlook,
    bytes_below,
)


def after(forecast: DiskForecast, seconds: float, free: float, used: float = 0.0, *, begin: float = 0.0) -> DiskOutlook:
    """Samples while free bytes shrink and the run grows, both per second."""
    now = begin
    outlook = forecast.note(now, 10**9, 0)
    while now < begin + seconds:
        now += SAMPLE_S
        outlook = forecast.note(now, int(10**9 - free * (now - begin)), int(used * (now - begin)))
    return outlook


def test_a_disk_that_shrinks_evenly_is_full_when_the_reserve_is_reached() -> None:
    outlook = after(DiskForecast(10**8), 600, free=10_000)
    assert outlook.full_in_s == pytest.approx((10**9 - 6_000_000 - 10**8) / 10_000, rel=1e-3)


def test_the_growth_of_the_run_counts_where_somebody_else_makes_room() -> None:
    outlook = after(DiskForecast(0), 600, free=-5_000, used=20_000)
    assert outlook.bytes_per_s == pytest.approx(20_000, rel=1e-3)


def test_nothing_is_foretold_of_a_short_time_or_of_a_disk_that_does_not_fill() -> None:
    assert after(DiskForecast(0), LEAST_S - SAMPLE_S, free=10_000).full_in_s is None
    assert after(DiskForecast(0), 600, free=0).full_in_s is None
    assert after(DiskForecast(0), 600, free=-10_000).full_in_s is None


def test_what_lies_longer_back_than_the_window_is_forgotten() -> None:
    forecast = DiskForecast(0)
    after(forecast, 600, free=100_000)
    outlook = after(forecast, WINDOW_S + SAMPLE_S, free=0, begin=700.0)
    assert outlook.full_in_s is None or outlook.full_in_s > 1e6
    assert math.isfinite(outlook.bytes_per_s)


def test_below_the_reserve_it_is_full_now() -> None:
    assert after(DiskForecast(2 * 10**9), 600, free=10_000).full_in_s == 0.0


def test_bytes_below_a_directory_are_those_on_the_disk(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_bytes(b"x" * 100_000)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert 100_000 <= bytes_below(tmp_path) < 200_000
    assert bytes_below(tmp_path / "nothing") == 0


def test_a_file_that_vanishes_does_not_take_the_others_of_its_directory_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abc":
        (tmp_path / name).write_bytes(b"x" * 100_000)
    listed = os.scandir

    def vanishing(path: str) -> Any:
        entries = list(listed(path))
        Path(entries[0].path).unlink()
        return contextlib.nullcontext(entries)

    monkeypatch.setattr(os, "scandir", vanishing)
    assert 200_000 <= bytes_below(tmp_path) < 300_000


def test_a_directory_that_cannot_be_read_counts_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "forbidden").mkdir()
    (tmp_path / "file").write_bytes(b"x" * 100_000)
    listed = os.scandir

    def refuse(path: str) -> Any:
        if path.endswith("forbidden"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return listed(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert 100_000 <= bytes_below(tmp_path) < 200_000
