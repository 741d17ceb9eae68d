"""The order of tests: files with slow tests first, those that take longest before the others.

Workers take one file after the other (``--dist loadfile --no-loadscope-reorder``), so the files that take minutes begin
at once, and many short ones fill the end.
"""

from __future__ import annotations

import gc
from collections.abc import Generator

import pytest

# Seconds of CPU and of waiting, longest first; files with slow tests that are not named here follow.
LONGEST = (
    "tests/e2e/test_two_nodes.py",
    "tests/integration/envgateway/test_hostile.py",
    "tests/e2e/test_first_run.py",
    "tests/e2e/test_ring_survives.py",
    "tests/integration/trainer_service/test_trainer_process.py",
    "tests/e2e/test_trainer_over_nodes.py",
    "tests/e2e/test_distillation.py",
    "tests/e2e/test_same_bits.py",
    "tests/e2e/test_surroundings.py",
    "tests/e2e/test_split_launch.py",
    "tests/e2e/test_walks.py",
    "tests/e2e/test_stalls.py",
    "tests/e2e/test_installed_wheel.py",
    "extras/farm/tests/test_processes.py",
    "extras/worlds/tests/test_alfworld_games.py",
    "tests/integration/envgateway/test_judge_verdicts.py",
    "tests/unit/benchmarks/test_study.py",
    "extras/farm/tests/test_judge_scripts.py",
    "tests/integration/trainer/test_gradients.py",
    "tests/integration/orchestrator/test_kill.py",
)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collecting makes a million objects that stay; looking for garbage among them takes a fifth of its time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by file alone: the order within a file stays."""
    slow = {file_of(item) for item in items if item.get_closest_marker("slow")}
    places = {file: place for place, file in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(file_of(item), len(LONGEST) + (file_of(item) not in slow)))


def file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]
