"""The supervisor's look at the memory of a run, and a program that the kernel killed for want of it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from services.envgateway.sandbox.bare import procfs, wire
from services.envgateway.sandbox.bare.run import Limits, Run
from services.envgateway.sandbox.bare.slots import Slot
from services.envgateway.sandbox.bare.statuses import RunStatus

LIMITS = Limits(10.0, 10.0, 100 << 20, 8, 1000, 1000, 1000, 64, 1 << 20, 64)


@pytest.fixture
def looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Run, list[str]]]:
    """A run, and the reads of its processes."""

    def make(shares_take_s: float, shares: int) -> tuple[Run, list[str]]:
        read: list[str] = []
        clock = iter(range(10_000))
        slot = Slot(0, 0, 5000, "0", str(tmp_path))
        made = Run(1, slot, LIMITS, (0, 0, 0, 0), 0.0)

        def proportional(family: list[int]) -> int:
            read.append("shares")
            return shares

        monkeypatch.setattr(procfs, "proportional_bytes", proportional)
        monkeypatch.setattr(procfs, "resident_bytes", lambda pid: 50 << 20)
        monkeypatch.setattr(procfs, "buffer_bytes", lambda family: 0)
        monkeypatch.setattr("time.monotonic", lambda: next(clock) * shares_take_s)
        return made, read

    return make


def test_many_mappings_make_the_look_at_shares_rare(looked: Callable[..., tuple[Run, list[str]]]) -> None:
    made, read = looked(shares_take_s=0.1, shares=60 << 20)
    times = [n / 100 for n in range(300)]
    assert not any(made.takes_too_much([1, 2, 3], 400 << 20, now) for now in times)
    assert 3 <= len(read) <= 3.0 / (5 * 0.1) + 1  # a sixth of the time at most


def test_shares_above_the_limit_are_too_much(looked: Callable[..., tuple[Run, list[str]]]) -> None:
    made, read = looked(shares_take_s=0.001, shares=101 << 20)
    assert made.takes_too_much([1, 2], 120 << 20, 1.0) and read == ["shares"]
    assert made.peak_memory_bytes == 101 << 20


def test_capacity_of_sockets_and_pipes_counts(
    looked: Callable[..., tuple[Run, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = looked(shares_take_s=0.001, shares=60 << 20)
    monkeypatch.setattr(procfs, "buffer_bytes", lambda family: 70 << 20)
    assert made.takes_too_much([1], 40 << 20, 1.0)


@pytest.mark.parametrize("ended_by", [signal.SIGKILL, signal.SIGSEGV])
@pytest.mark.parametrize("kills", [0, 1])
def test_a_program_that_the_kernel_kills_below_its_limit_has_no_verdict(
    looked: Callable[..., tuple[Run, list[str]]], monkeypatch: pytest.MonkeyPatch, kills: int, ended_by: int
) -> None:
    monkeypatch.setattr(procfs, "oom_kills", lambda: 7)
    made, _ = looked(shares_take_s=0.001, shares=0)
    monkeypatch.setattr(procfs, "oom_kills", lambda: 7 + kills)
    made._note, made.wait_status = wire.READY_NOTE, ended_by
    head, _ = made.result("2")
    no_memory = kills and ended_by == signal.SIGKILL
    assert head["status"] is (RunStatus.INFRA_ERROR if no_memory else RunStatus.RUNTIME_ERROR)
    assert ("no memory left" in head["detail"]) is bool(no_memory)
