from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.orchestrator.metrics import LIVE_S, Timeline

intervals = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=20)


def covered(found: list[tuple[float, float]]) -> set[int]:
    return {second for begin, end in found for second in range(int(begin), int(end))}


def test_overlap_share_is_the_share_of_compute_time_in_which_tokens_were_emitted() -> None:
    timeline = Timeline()
    timeline.computed("model0", [(0.0, 10.0), (20.0, 30.0)])
    timeline.emitted([(5.0, 12.0)])
    timeline.emitted([(8.0, 25.0)])
    assert timeline.overlap_share == (5.0 + 5.0) / 20.0


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
