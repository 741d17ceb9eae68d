"""Conditions on every slot after any run: no process, no file, and the next program unaffected."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Collection
from pathlib import Path

from services.envgateway.sandbox.pool import SandboxPool
from services.envgateway.sandbox.records import ExecutionRequest
from tests.running import is_running
from tests.waiting import WAIT_S, until, wait_until


def slot_dirs(pool: SandboxPool) -> list[Path]:
    return sorted(pool.base_dir.glob("slot-*"))


def children_of(pid: int) -> list[int]:
    """Empty for a process that has ended meanwhile."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def supervisor_of(pool: SandboxPool) -> int:
    assert pool.supervisor_pid is not None
    return pool.supervisor_pid


def programs(supervisor: int) -> list[int]:
    """The processes of programs: a supervisor forks them through its fork servers."""
    found = [child for fork_server in children_of(supervisor) for child in children_of(fork_server)]
    for process in found:
        found += children_of(process)
    return found


async def until_programs_run(pool: SandboxPool, at_least: int = 1) -> None:
    """Wait until this many processes of programs run."""
    await until(lambda: len(programs(pool.supervisor_pid or 0)) >= at_least, "programs run")


def kill_supervisor(pool: SandboxPool) -> None:
    """Kill, and wait for the end."""
    pid = supervisor_of(pool)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_running(pid), "the supervisor has ended")


def kill_fork_server_at_its_next_fork(pool: SandboxPool) -> None:
    """Kill the fork server within a fraction of a millisecond of its next fork; blocks until then."""
    supervisor = supervisor_of(pool)
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        for process in children_of(supervisor):
            if children_of(process):
                os.kill(process, signal.SIGKILL)
                return
    raise AssertionError(f"no fork server has forked within {WAIT_S:g} s")


def processes_of(users: Collection[int]) -> list[int]:
    """The living processes of users."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                status = (entry / "status").read_text()
            except OSError:
                continue
            # where the machine's first process reaps nobody, a dead one stays listed
            if "State:\tZ" not in status and int(status.split("Uid:")[1].split()[0]) in users:
                found.append(int(entry.name))
    return found


def processes_of_slots(pool: SandboxPool) -> list[str]:
    return [_described(Path(f"/proc/{pid}")) for pid in processes_of(pool.user_ids)]


def _described(entry: Path) -> str:
    """Enough to find where a process comes from: its state, parent and command."""
    try:
        lines = (entry / "status").read_text().splitlines()
        fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:80]
        stack = (entry / "wchan").read_text()
    except OSError:
        return f"{entry.name}, gone"
    return f"{entry.name} {[fields[name] for name in ('Name', 'State', 'PPid', 'Uid', 'Threads')]} {command!r} {stack}"


async def assert_clean(pool: SandboxPool) -> None:
    """Assert that all slots are empty, and that all of them run a program as in a new sandbox."""
    left = processes_of_slots(pool)
    assert not left, left
    for slot in slot_dirs(pool):
        assert [p.name for p in slot.iterdir()] == ["work"] and list((slot / "work").iterdir()) == []
    code = "import os; print(sorted(os.listdir('.')), 1)"
    runs = (pool.run(ExecutionRequest(code=code)) for _ in range(pool.config.num_slots))
    assert {r.stdout for r in await asyncio.gather(*runs)} == {b"[] 1\n"}
