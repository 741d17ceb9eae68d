"""Memory cgroups as they are found and used, and a supervisor's look at memory without one."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.envgateway.sandbox.bare import memcg, procfs
from services.envgateway.sandbox.bare.run import Limits, Run
from services.envgateway.sandbox.bare.slots import Slot
from services.envgateway.sandbox.bare.statuses import RunStatus

FILES = {"memory.current": "7000\n", "memory.max": "", "memory.swap.max": "", "memory.oom.group": "",
         "memory.events": "low 0\nhigh 0\nmax 9\noom 3\noom_kill 2\noom_group_kill 1\n", "cgroup.procs": "11\n12\n"}  # fmt: skip


@pytest.fixture
def orders() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The channel to the process that moves others."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, orders: tuple[socket.socket, socket.socket]
) -> Iterator[memcg.SlotMemory]:
    """A directory with the files that the kernel would make."""
    directory = tmp_path / "slot-3"
    directory.mkdir()
    for name, text in FILES.items():
        (directory / name).write_text(text)
    with monkeypatch.context() as patched:
        patched.setattr("os.mkdir", lambda path: None)
        made = memcg.SlotMemory(str(directory), orders[0])
    yield made
    made.close()


def test_a_cgroup_is_limited_with_its_swap_and_read(
    slot: memcg.SlotMemory, orders: tuple[socket.socket, socket.socket]
) -> None:
    slot.limit(256 << 20)
    written = {path.name: path.read_text() for path in Path(slot.directory).iterdir()}
    assert (written["memory.max"], written["memory.swap.max"]) == (str(256 << 20), "0")
    assert (slot.usage_bytes(), slot.look([7], 256 << 20)) == (7000, None)
    slot.look([10, 11, 12, 13], 256 << 20)
    assert [orders[1].recv(64) for _ in range(3)] == [b"slot-3 7", b"slot-3 10", b"slot-3 13"]  # two are there already
    slot.look([*range(1000, 6000)], 256 << 20)
    assert 1000 in slot._moved and 5999 not in slot._moved  # nobody reads: it is ordered again at the next look


@pytest.mark.parametrize("at_own_limit", [True, False])
def test_a_kill_by_the_kernel_is_the_programs_fault_only_at_its_own_limit(
    slot: memcg.SlotMemory, tmp_path: Path, at_own_limit: bool
) -> None:
    of_slot = Slot(0, 0, 5000, "0", str(tmp_path))
    of_slot.memory = slot
    run = Run(1, of_slot, LIMITS, (0, 0, 0, 0), 0.0)
    assert run._group is not None and run._group.look([11], 100 << 20) is None
    events = Path(slot.directory) / "memory.events"
    told = events.read_text().replace("oom_kill 2", "oom_kill 3")
    events.write_text(told.replace("\noom 3", "\noom 4") if at_own_limit else told)
    run.left_its_process()
    assert run.stop_status is (RunStatus.MEMORY_LIMIT if at_own_limit else RunStatus.INFRA_ERROR)
    assert ("no memory left" in run.detail) is not at_own_limit


@pytest.mark.parametrize(
    ("own", "mounts", "expected"),
    [
        (["0::/user.slice"], ["31 1 0:1 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw"], "/sys/fs/cgroup/user.slice"),
        (["0::/docker/1/in"], ["31 1 0:1 /docker/1 /sys/fs/cgroup ro shared:9 - cgroup2 cgroup2 rw"], "/sys/fs/cgroup/in"),
        (["4:memory:/a"], ["31 1 0:1 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"], ""),
        ([], [], ""),
    ],
)  # fmt: skip
def test_the_memory_cgroup_of_this_process_is_found(
    monkeypatch: pytest.MonkeyPatch, own: list[str], mounts: list[str], expected: str
) -> None:
    files = {"/proc/self/cgroup": own, "/proc/self/mountinfo": mounts}
    monkeypatch.setattr(memcg, "_lines", lambda path: files.get(path, ["cpu memory io"]))
    assert memcg._own_cgroup() == expected


def test_where_no_cgroup_can_be_made_the_reason_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memcg, "_own_cgroup", lambda: str(tmp_path / "missing"))
    assert "No such file" in str(memcg.grant(2))
    monkeypatch.setattr(memcg, "_own_cgroup", str)
    assert "no memory controller" in str(memcg.grant(2))


LIMITS = Limits(10.0, 10.0, 100 << 20, 8, 1000, 1000, 1000, 64, 1 << 20, 64)


@pytest.fixture
def looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Run, list[str]]]:
    """A run, and the reads of its processes."""

    def make(shares_take_s: float, shares: int, group: bool = False) -> tuple[Run, list[str]]:
        read: list[str] = []
        clock = iter(range(10_000))
        slot = Slot(0, 0, 5000, "0", str(tmp_path))
        made = Run(1, slot, LIMITS, (0, 0, 0, 0), 0.0)
        made._group = object() if group else None  # type: ignore[assignment]

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


def test_where_a_cgroup_counts_the_shares_are_never_asked_for(looked: Callable[..., tuple[Run, list[str]]]) -> None:
    made, read = looked(shares_take_s=0.1, shares=999 << 20, group=True)
    assert not made.takes_too_much([1, 2, 3], 400 << 20, 1.0) and not read
    assert made.takes_too_much([1], 101 << 20, 1.0)  # memory of one process needs no share


def test_shares_above_the_limit_are_too_much(looked: Callable[..., tuple[Run, list[str]]]) -> None:
    made, read = looked(shares_take_s=0.001, shares=101 << 20)
    assert made.takes_too_much([1, 2], 120 << 20, 1.0) and read == ["shares"]
    assert made.peak_memory_bytes == 101 << 20


def test_capacity_of_sockets_and_pipes_counts_without_a_cgroup(
    looked: Callable[..., tuple[Run, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = looked(shares_take_s=0.001, shares=60 << 20)
    monkeypatch.setattr(procfs, "buffer_bytes", lambda family: 70 << 20)
    assert made.takes_too_much([1], 40 << 20, 1.0)
