"""``python tests/no_namespaces.py [--user UID] PROGRAM ...``: runs a program as under Docker's default seccomp profile without
capabilities: new namespaces, mounts and another root are refused. ``--one-user``: as root of a user namespace that has one user.

Standard library alone: it becomes another user before anything else is imported.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import json
import os
import struct
import sys

_CALLS = {"x86_64": (272, 165, 155, 308), "aarch64": (97, 40, 41, 268)}  # unshare, mount, pivot_root, setns
_LOAD, _EQUAL, _RETURN, _ALLOW, _EPERM = 0x20, 0x15, 0x06, 0x7FFF0000, 0x00050001
_NEW_USER = 0x10000000
_libc = ctypes.CDLL(None, use_errno=True)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def refuse_namespaces() -> None:
    calls = _CALLS[os.uname().machine]
    code = struct.pack("=HBBI", _LOAD, 0, 0, 0)
    for at, call in enumerate(calls):
        code += struct.pack("=HBBI", _EQUAL, len(calls) - at, 0, call)
    code += struct.pack("=HBBI", _RETURN, 0, 0, _ALLOW) + struct.pack("=HBBI", _RETURN, 0, 0, _EPERM)
    program = _Program(len(code) // 8, code)
    _checked(_libc.prctl(38, 1, 0, 0, 0))
    _checked(_libc.prctl(22, 2, ctypes.byref(program), 0, 0))


def become_root_of_one_user() -> None:
    uid, gid = os.getuid(), os.getgid()
    _checked(_libc.unshare(_NEW_USER))
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


class _Comparison(ctypes.Structure):
    _fields_ = (
        ("argument", ctypes.c_uint),
        ("how", ctypes.c_int),
        ("first", ctypes.c_uint64),
        ("second", ctypes.c_uint64),
    )


def load_profile(path: str) -> list[str]:
    """Enforce a profile of Docker's form; returns the names that libseccomp does not know."""
    with open(path) as file:
        profile = json.load(file)
    library = ctypes.CDLL(ctypes.util.find_library("seccomp"))
    library.seccomp_init.restype = ctypes.c_void_p
    library.seccomp_rule_add_array.argtypes = (
        ctypes.c_void_p,
        ctypes.c_uint32,
        ctypes.c_int,
        ctypes.c_uint,
        ctypes.c_void_p,
    )
    library.seccomp_load.argtypes = (ctypes.c_void_p,)
    context = library.seccomp_init(ctypes.c_uint32(0x50000 | profile["defaultErrnoRet"]))
    unknown = []
    for rule in profile["syscalls"]:
        allows = rule["action"] == "SCMP_ACT_ALLOW"
        compared = [_Comparison(a["index"], {"SCMP_CMP_NE": 1, "SCMP_CMP_EQ": 4}[a["op"]], a["value"], 0)
                    for a in rule.get("args", ())]  # fmt: skip
        for name in rule["names"]:
            number = library.seccomp_syscall_resolve_name(name.encode())
            if number == -1:
                unknown.append(name)
            elif number >= 0:
                action = _ALLOW if allows else 0x50000 | rule["errnoRet"]
                _checked(
                    library.seccomp_rule_add_array(
                        context, action, number, len(compared), (_Comparison * len(compared))(*compared)
                    )
                )
    _checked(library.seccomp_load(context))
    return unknown


def _checked(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if arguments[0] == "--user":
        if os.getuid() == 0:
            os.setgroups([])
            os.setgid(int(arguments[1]))
            os.setuid(int(arguments[1]))
        del arguments[:2]
    if arguments[0] == "--one-user":
        del arguments[0]
        become_root_of_one_user()
    else:
        refuse_namespaces()
    os.execvp(arguments[0], arguments)
