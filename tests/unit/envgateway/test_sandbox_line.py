"""Programs sent ahead of a free slot: who begins next, who leaves a slot to whom, and those that are no longer wanted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.envgateway.sandbox.bare.line import Line, Request
from services.envgateway.sandbox.bare.run import Limits

LIMITS = Limits(
    wall_s=1, cpu_s=1, memory_bytes=1, processes=1, output_bytes=1, answer_bytes=1, file_bytes=1, open_files=1,
    disk_bytes=1, num_files=1,
)  # fmt: skip


def request(run_id: int, patient: bool) -> Request:
    return Request({"id": run_id, "patient": patient}, LIMITS, b"", b"", b"")


def begun(line: Line) -> list[int]:
    taken = []
    while (next_one := line.take()) is not None:
        taken.append(next_one.head["id"])
    return taken


def test_the_urgent_go_first_and_the_patient_leave_them_a_slot() -> None:
    line = Line(num_slots=3)
    for run_id in range(5):
        line.add(request(run_id, patient=True))
    assert begun(line) == [0, 1]
    line.add(request(10, patient=False))
    line.add(request(11, patient=False))
    assert begun(line) == [10]
    line.ended(0)
    assert begun(line) == [11]
    line.ended(1)
    line.ended(10)
    assert begun(line) == [2, 3]


def test_a_single_slot_serves_both() -> None:
    line = Line(num_slots=1)
    line.add(request(0, patient=True))
    line.add(request(1, patient=False))
    assert begun(line) == [1]
    line.ended(1)
    assert begun(line) == [0]


def test_one_that_is_no_longer_wanted_never_begins_and_what_is_said_to_it_meanwhile_is_kept() -> None:
    line = Line(num_slots=2)
    for run_id in range(3):
        line.add(request(run_id, patient=True))
    assert begun(line) == [0]
    waiting = line.find(2)
    assert waiting is not None and line.find(0) is None
    waiting.payload += b"words"
    assert line.remove(1) and not line.remove(1) and not line.remove(0)
    line.ended(0)
    taken = line.take()
    assert taken is not None and (taken.head["id"], taken.payload) == (2, b"words")


@given(st.integers(1, 5), st.lists(st.tuples(st.sampled_from("aae"), st.booleans(), st.integers(0, 60)), max_size=80))
def test_no_order_of_events_runs_too_many_or_forgets_one(num_slots: int, events: list[tuple[str, bool, int]]) -> None:
    line = Line(num_slots)
    patient_of: dict[int, bool] = {}
    running: list[int] = []
    seen: list[int] = []
    for kind, patient, which in events:
        if kind == "a":
            run_id = len(patient_of)
            patient_of[run_id] = patient
            line.add(request(run_id, patient))
        elif running:
            line.ended(running.pop(which % len(running)))
        taken = begun(line)
        running += taken
        seen += taken
        assert len(running) <= num_slots
        assert sum(patient_of[run_id] for run_id in running) <= max(1, num_slots - 1)
    while running:
        line.ended(running.pop())
        taken = begun(line)
        running += taken
        seen += taken
    assert sorted(seen) == sorted(patient_of)
