"""What must be true of every slot after any run: no process, no file, and the next program unaffected."""

from __future__ import annotations

import asyncio
from pathlib import Path

from services.envgateway.sandbox.pool import SandboxPool
from services.envgateway.sandbox.records import ExecutionRequest


def slot_dirs(pool: SandboxPool) -> list[Path]:
    return sorted(Path(pool._launcher._base_dir).glob("slot-*"))


def processes_of_slots(pool: SandboxPool) -> list[str]:
    users = set(pool._launcher._users.uids)
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                status = (entry / "status").read_text()
            except OSError:
                continue
            if "State:\tZ" in status:
                continue  # dead; where the machine's first process reaps nobody, it stays listed
            if int(status.split("Uid:")[1].split()[0]) in users:
                found.append(status.split("\n")[0])
    return found


async def assert_clean(pool: SandboxPool) -> None:
    """All slots are empty, and all of them run a program as if nothing had been."""
    assert processes_of_slots(pool) == []
    for slot in slot_dirs(pool):
        assert [p.name for p in slot.iterdir()] == ["work"] and list((slot / "work").iterdir()) == []
    code = "import os; print(sorted(os.listdir('.')), 1)"
    runs = (pool.run(ExecutionRequest(code=code)) for _ in range(pool.config.num_slots))
    assert {r.stdout for r in await asyncio.gather(*runs)} == {b"[] 1\n"}
