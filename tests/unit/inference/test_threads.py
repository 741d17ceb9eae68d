"""Work on a few threads: every call runs once, failures are raised, small work stays in the calling thread."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from services.inference.engine.base import num_threads, run_all


@pytest.mark.parametrize("touched_bytes", [0, 1 << 30])
def test_every_call_runs_once(touched_bytes: int) -> None:
    ran: list[int] = []
    run_all([partial(ran.append, number) for number in range(100)], touched_bytes=touched_bytes, name="test")
    assert sorted(ran) == list(range(100))


def test_small_work_starts_no_thread() -> None:
    seen: list[threading.Thread] = []
    run_all([lambda: seen.append(threading.current_thread())], touched_bytes=100, name="test")
    assert seen == [threading.current_thread()]


@pytest.mark.parametrize("touched_bytes", [0, 1 << 30])
def test_a_failure_comes_out(touched_bytes: int) -> None:
    def fail() -> None:
        raise KeyError("this one")

    with pytest.raises(KeyError, match="this one"):
        run_all([lambda: None, fail], touched_bytes=touched_bytes, name="test")


def test_no_more_threads_than_cores() -> None:
    assert 1 <= num_threads() <= 2
