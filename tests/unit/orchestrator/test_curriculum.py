from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.orchestrator.tasks.orders import Curriculum


@given(num_tasks=st.integers(1, 50), seed=st.integers(0, 5), passes=st.integers(1, 3))
def test_every_task_is_drawn_once_per_pass(num_tasks: int, seed: int, passes: int) -> None:
    curriculum = Curriculum(num_tasks, seed)
    rows = [curriculum.draw()[1] for _ in range(num_tasks * passes)]
    for number in range(passes):
        assert sorted(rows[number * num_tasks : (number + 1) * num_tasks]) == list(range(num_tasks))


@given(num_tasks=st.integers(1, 50), position=st.integers(0, 200))
def test_a_position_is_enough_to_go_on(num_tasks: int, position: int) -> None:
    whole = Curriculum(num_tasks, seed=3)
    rows = [whole.draw() for _ in range(position + 5)]
    resumed = Curriculum(num_tasks, seed=3)
    resumed.resume_after(position)
    assert [resumed.draw() for _ in range(4)] == rows[position + 1 :]
