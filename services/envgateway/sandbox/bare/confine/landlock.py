"""Landlock rules: which files a program may read and where it may write.

Wraps the kernel's interface only; the caller chooses the paths of a rule set.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Iterable
from typing import Any

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_RULE_PATH_BENEATH = 1
_GET_VERSION = 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_ALL_V1 = (1 << 13) - 1
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_MAKE_DEVICES = (1 << 6) | (1 << 9) | (1 << 11)  # character, socket, block: never needed in a work dir
_SCOPE_ABSTRACT_UNIX, _SCOPE_SIGNAL = 1, 2
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV

_libc = ctypes.CDLL(None, use_errno=True)


def abi_version() -> int:
    """The kernel's Landlock version; 0 where there is none."""
    version: int = _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _GET_VERSION)
    return max(version, 0)


def create_ruleset(
    abi: int, readable: Iterable[str], writable: Iterable[str], devices: Iterable[str], executable: Iterable[str] = ()
) -> int:
    """A rule set's descriptor; paths that do not exist are left out. The rules hold inodes, not names."""
    handled = _ALL_V1
    handled |= _REFER if abi >= 2 else 0
    handled |= _TRUNCATE if abi >= 3 else 0
    handled |= _IOCTL_DEV if abi >= 5 else 0
    attributes = struct.pack("=Q", handled)
    if abi >= 4:
        attributes += struct.pack("=Q", 0)  # TCP is left to seccomp, which refuses sockets of any kind
    if abi >= 6:
        attributes += struct.pack("=Q", _SCOPE_ABSTRACT_UNIX | _SCOPE_SIGNAL)
    ruleset: int = _libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    if ruleset < 0:
        raise OSError(ctypes.get_errno(), "landlock_create_ruleset")
    for path in readable:
        _allow(ruleset, path, _READ_FILE | _READ_DIR)
    for path in executable:
        _allow(ruleset, path, _EXECUTE | _READ_FILE)
    for path in writable:
        _allow(ruleset, path, handled & ~_EXECUTE & ~_MAKE_DEVICES & ~_IOCTL_DEV)
    for path in devices:
        _allow(ruleset, path, _READ_FILE | _WRITE_FILE)
    return ruleset


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError):
        return
    try:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            rights &= _FILE_RIGHTS
        rule = struct.pack("=Qi", rights, fd)
        if _libc.syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, rule, 0):
            raise OSError(ctypes.get_errno(), "landlock_add_rule", path)
    finally:
        os.close(fd)


def restriction(ruleset: int) -> tuple[Any, tuple[int, int, int], bool]:
    """The call that restricts a process to the rule set, its arguments, and that it returns 0; needs no_new_privs or CAP_SYS_ADMIN."""
    return _libc.syscall, (_RESTRICT_SELF, ruleset, 0), True
