"""Metrics of a run: scalars, event files, the overlap, and the forecast of a full disk."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.cli.inspect.run_state import read_metrics
from services.orchestrator.metrics import (
    LEAST_SAMPLES_S,
    LIVE_S,
    SAMPLE_S,
    DiskForecast,
    DiskOutlook,
    EventFile,
    Timeline,
    bytes_below,
    crc32c,
    scalars_of,
)
from tests.unit.orchestrator.metrics_rows import STEP, write_run

# --- scalars


def test_scalars_have_group_step_and_time(tmp_path: Path) -> None:
    write_run(tmp_path)
    found = [scalars for row in read_metrics(tmp_path) if (scalars := scalars_of(row)) is not None]
    first = found[0]
    assert (first.group, first.step, dict(first.values)) == ("model0", 1, STEP)
    assert {scalars.group for scalars in found} == {"model0", "throughput", "weights/model0/a"}
    assert next(s for s in found if s.group == "weights/model0/a").values["bits_per_change"] == 2.0


def test_an_evaluation_has_a_curve_for_each_sampling_and_dataset() -> None:
    estimate = {"value": 0.5, "low": 0.4, "high": 0.6}
    row = {
        "time": 1.0, "kind": "evaluation", "name": "step-8/greedy", "newest_versions": {"model0": 8}, "mean_reward": 0.5,
        "datasets": [{"name": "held_out", "mean_reward": estimate, "pass_at": {"4": estimate}}], "roles": {"model0/agent/0": 0.5},
    }  # fmt: skip
    found = scalars_of(row)
    assert found is not None and found.step == 8
    assert set(found.tagged) == {"evaluation/greedy", "evaluation/greedy/held_out", "evaluation/greedy/held_out/pass@4"}


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "text", True])
def test_what_is_no_finite_number_is_left_out(value: object) -> None:
    row = {"time": 1.0, "kind": "training_step", "policy": "model0", "step": 1, "x": value, "trainer/loss": 1.0}
    found = scalars_of(row)
    assert found is not None and dict(found.values) == {"trainer/loss": 1.0}


# --- event files


def test_crc32c_has_its_check_value() -> None:
    assert crc32c(b"123456789") == 0xE3069283


@pytest.mark.slow
def test_tensorboard_reads_the_scalars_back(tmp_path: Path) -> None:
    from tensorboardX.proto import event_pb2  # takes seconds

    board = EventFile(tmp_path)
    board.scalars(300, {"model0/reward_mean": 0.5, "model0/loss": -1.25})
    board.close()
    data = next(tmp_path.iterdir()).read_bytes()
    events = []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        events.append(event_pb2.Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    assert events[0].file_version == "brain.Event:2"
    assert events[1].step == 300
    assert {v.tag: v.simple_value for v in events[1].summary.value} == {"model0/reward_mean": 0.5, "model0/loss": -1.25}


# --- overlap


def test_settling_and_restoring_change_no_total() -> None:
    timeline = Timeline()
    for second in range(0, 1000, 10):
        timeline.computed("model0", [(second, second + 6.0)])
        timeline.emitted([(second + 4.0, second + 10.0)])
        timeline.settle(float(second))
    assert timeline.overlap_share == 2.0 / 6.0
    restored = Timeline()
    restored.restore(timeline.totals())
    assert restored.overlap_share == timeline.overlap_share
    assert sum(len(s) for s in timeline._compute.values()) <= LIVE_S / 10 + 2


@given(
    step_s=st.floats(0.1, 3000.0),
    idle_s=st.floats(0.0, 600.0),
    share=st.floats(0.0, 1.0),
    num_steps=st.integers(1, 12),
    report_s=st.floats(1.0, 5.0),
)
def test_the_overlap_of_steps_of_any_length_is_the_share_in_which_replicas_generated(
    step_s: float, idle_s: float, share: float, num_steps: int, report_s: float
) -> None:
    """A step is reported at its end; replicas report at intervals, and totals are settled every five seconds."""
    timeline, now = Timeline(), 1000.0
    for _ in range(num_steps):
        begin, end, generated = now, now + step_s, now + share * step_s
        at = begin
        for _ in range(200):  # reports
            until = min(at + max(report_s, step_s / 100), generated)
            timeline.emitted([(at, until)])
            timeline.settle(until)
            at = until
            if at >= generated:
                break
        timeline.settle(end)
        timeline.computed("model0", [(begin, end)])
        now = end + idle_s
        timeline.settle(now)
    assert abs(timeline.overlap_share - share) < 1e-6


# --- free disk


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
