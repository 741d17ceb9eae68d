from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from services.orchestrator.metrics import (
    LEAST_SAMPLES_S,
    SAMPLE_S,
    DiskForecast,
    DiskOutlook,
    bytes_below,
)

GIB = 1 << 30


def after(
    forecast: DiskForecast,
    seconds: float,
    used: float,
    *,
    begin: float = 0.0,
    free: float = 10**9,
    shrinks: float = 0.0,
) -> DiskOutlook:
    """Samples while the run grows and the free bytes shrink, both per second."""
    now = begin
    outlook = forecast.note(now, int(free), 0)
    while now < begin + seconds:
        now += SAMPLE_S
        outlook = forecast.note(now, int(free - shrinks * (now - begin)), int(used * (now - begin)))
    return outlook


def checkpoints(forecast: DiskForecast, number: int, num_bytes: int, free: int, every_s: float = 300.0) -> DiskOutlook:
    """A run that keeps all of its checkpoints and writes little else; ends two minutes after the newest."""
    used, outlook = 0, forecast.note(0.0, free, 0)
    for step in range(1, number + 1):
        used += num_bytes
        for second in range(0, int(every_s), int(SAMPLE_S)):
            now = step * every_s + second
            outlook = forecast.note(now, free - used, used + int(100 * now), step)
            if step == number and second > LEAST_SAMPLES_S:
                break
    return outlook


def test_a_run_that_grows_evenly_is_full_when_the_reserve_is_reached() -> None:
    outlook = after(DiskForecast(10**8), 600, used=10_000)
    assert outlook.full_in_s == pytest.approx((10**9 - 10**8) / 10_000, rel=1e-3)


@pytest.mark.parametrize("shrinks", [-5_000.0, 0.0, 5_000.0, 2.6e6])
def test_the_growth_of_the_run_alone_counts(shrinks: float) -> None:
    outlook = after(DiskForecast(0), 300, used=20_000, shrinks=shrinks)
    assert outlook.bytes_per_s == pytest.approx(20_000, rel=1e-3)


@pytest.mark.parametrize("num_bytes", [GIB // 2, 2 * GIB, 5 * GIB])
def test_the_first_checkpoints_are_not_extrapolated(num_bytes: int) -> None:
    assert checkpoints(DiskForecast(0), 1, num_bytes, 60 * GIB).full_in_s is None
    after_two = checkpoints(DiskForecast(0), 2, num_bytes, 60 * GIB)
    assert after_two.full_in_s is None or after_two.full_in_s > 30 * 86400
    assert checkpoints(DiskForecast(0, 4), 4, num_bytes, 60 * GIB).bytes_per_s < 200


def test_checkpoints_that_are_never_deleted_fill_the_disk_at_their_pace() -> None:
    outlook = checkpoints(DiskForecast(0), 8, GIB, 60 * GIB)
    assert outlook.full_in_s is not None
    assert outlook.bytes_per_s == pytest.approx(GIB / 300, rel=0.3)


def test_with_little_space_left_the_forecast_does_not_wait_for_checkpoints() -> None:
    assert checkpoints(DiskForecast(0), 1, 2 * GIB, 3 * GIB).full_in_s is not None
    assert after(DiskForecast(0), 300, used=1e6, free=GIB // 2).full_in_s == pytest.approx(GIB / 2 / 1e6, rel=0.01)


def test_nothing_is_foretold_of_a_short_time_or_of_a_run_that_does_not_grow() -> None:
    assert after(DiskForecast(0), LEAST_SAMPLES_S - SAMPLE_S, used=10_000).full_in_s is None
    assert after(DiskForecast(0), 600, used=0).full_in_s is None
    assert after(DiskForecast(0), 600, used=0, shrinks=-10_000).full_in_s is None


def test_below_the_reserve_it_is_full_now() -> None:
    assert after(DiskForecast(2 * 10**9), 600, used=10_000).full_in_s == 0.0
    assert after(DiskForecast(2 * 10**9), 600, used=0).full_in_s == 0.0


def test_bytes_below_a_directory_are_those_on_the_disk(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_bytes(b"x" * 100_000)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert 100_000 <= bytes_below(tmp_path) < 200_000
    assert bytes_below(tmp_path / "nothing") == 0


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
