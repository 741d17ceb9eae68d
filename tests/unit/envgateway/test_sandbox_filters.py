"""The seccomp filters by their answers, through an interpreter of the instructions that they use."""

from __future__ import annotations

import ctypes
import errno
import struct

import pytest

from services.envgateway.sandbox.bare import seccomp
from services.envgateway.sandbox.bare.confinement import take


@pytest.fixture(autouse=True)
def numbers_of_x86_64(monkeypatch: pytest.MonkeyPatch) -> None:
    """A filter is only bytes: any machine can interpret the filter."""
    monkeypatch.setattr(seccomp, "machine", lambda: "x86_64")


PID, GATEWAY = 4242, 77
ALLOWED, PRETENDED, REFUSED, UNKNOWN = "allowed", "pretended", errno.EPERM, errno.ENOSYS
ALLOW, ERRNO = 0x7FFF0000, 0x00050000


def answer(code: bytes, number: int, *arguments: int) -> object:
    """The kernel's answer to a call."""
    data = struct.pack("=iIQ6Q", number, 0xC000003E, 0, *[a & (1 << 64) - 1 for a in (*arguments, *[0] * 6)[:6]])
    loaded, at = 0, 0
    while True:
        operation, if_true, if_false, k = struct.unpack_from("=HBBI", code, 8 * at)
        at += 1
        if operation == 0x20:
            loaded = struct.unpack_from("=I", data, k)[0]
        elif operation == 0x06:
            return ALLOWED if k == ALLOW else (k - ERRNO or PRETENDED)
        else:
            held = {0x15: loaded == k, 0x35: loaded >= k, 0x45: bool(loaded & k)}[operation]
            at += if_true if held else if_false


def common(number: int, *arguments: int, tier: str = "U") -> object:
    return answer(seccomp._common_filter(tier, False), number, *arguments)


def child(number: int, *arguments: int, processes: bool = False) -> object:
    return answer(seccomp._child_filter(PID, processes), number, *arguments)


@pytest.mark.parametrize("processes", [False, True])
@pytest.mark.parametrize(
    ("number", "arguments", "expected"),
    [
        (302, (0, 7), ALLOWED),  # prlimit64: itself
        (302, (PID, 7), ALLOWED),
        (302, (0, 12), REFUSED),  # the mark
        (302, (GATEWAY, 7), REFUSED),
        (302, (GATEWAY, 12), REFUSED),
        (302, (-1, 7), REFUSED),
        (160, (7,), ALLOWED),  # setrlimit
        (160, (12,), REFUSED),
        (203, (0,), ALLOWED),  # sched_setaffinity
        (203, (PID,), ALLOWED),
        (203, (GATEWAY,), REFUSED),
        (62, (PID, 9), ALLOWED),  # kill
        (62, (-PID, 9), ALLOWED),
        (62, (0, 9), ALLOWED),
        (62, (-1, 9), REFUSED),
        (62, (GATEWAY, 0), REFUSED),
        (234, (GATEWAY, GATEWAY, 9), REFUSED),  # tgkill
        (72, (3, 8, GATEWAY), REFUSED),  # fcntl: who is sent a signal, and which
        (72, (3, 15, 0), REFUSED),
        (72, (3, 10, 9), REFUSED),
        (72, (3, 4, 0), ALLOWED),
        (16, (3, 0x8901), REFUSED),  # ioctl
        (16, (3, 0x8902), REFUSED),
        (16, (3, 0x5401), ALLOWED),
        (157, (62, 1, GATEWAY), REFUSED),  # prctl: core scheduling
        (157, (15,), ALLOWED),
        (90, (), PRETENDED),  # chmod
        (188, (), PRETENDED),  # setxattr
        (272, (0x10000000,), REFUSED),  # unshare
        (0, (), ALLOWED),
    ],
)
def test_a_program_reaches_no_process_but_itself(
    number: int, arguments: tuple[int, ...], expected: object, processes: bool
) -> None:
    assert child(number, *arguments, processes=processes) == expected


@pytest.mark.parametrize("tier", ["2", "1", "U", "0"])
def test_every_tier_has_the_same_list_of_refusals(tier: str) -> None:
    def told(number: int, *arguments: int) -> object:
        return common(number, *arguments, tier=tier)

    assert [told(n) for n in (463, 464, 466, 467, 469, 500, 0x40000000, 0x40000001)] == [UNKNOWN] * 8
    assert [told(n) for n in (425, 443, 447, 448, 451, 319, 29, 254, 256, 279, 59, 41, 101, 251)] == [REFUSED] * 14
    assert [told(n) for n in (0, 1, 436, 439, 444, 446, 449, 462)] == [ALLOWED] * 8
    assert told(73, 3, 2) == PRETENDED  # flock
    assert [told(72, 3, command) for command in (6, 7, 37, 38)] == [PRETENDED] * 4
    assert [told(72, 3, command) for command in (1, 2, 3, 4, 5, 36, 1030)] == [ALLOWED] * 7
    assert told(435) == UNKNOWN and told(56, 0x11) == ALLOWED and told(56, 0x10000000) == REFUSED


def test_a_step_fails_by_its_status_and_by_no_other_value() -> None:
    taken: list[int] = []
    take([(taken.append, (1,), True), (bool, (1,), False), (taken.append, (2,), False)])
    assert taken == [1, 2]
    libc = ctypes.CDLL(None, use_errno=True)
    with pytest.raises(OSError, match=r"chdir.*No such file or directory"):
        take([(libc.chdir, (b"/nowhere",), True), (taken.append, (3,), False)])
    assert taken == [1, 2]
