"""Directories below the root that a Harbor task may write; each is a part of the work dir of its sandbox.

The root of the sandbox is made before it knows a task, so the names are fixed.
"""

from __future__ import annotations

from pathlib import PurePosixPath

ENVIRONMENT = "harbor"  # the gateway's environment that plays the tasks
SCORED_AT_END = frozenset({ENVIRONMENT})  # environments that give their reward at an action that asks for nothing
TESTS, LOGS, SOLUTION = "/tests", "/logs", "/solution"
WRITABLE = (
    "app", "build", "code", "data", "home", "input", "logs", "mnt", "opt", "oracle", "output", "project", "repo", "root", "solution",
    "src", "srv", "testbed", "tests", "tmp", "workdir", "workspace",
)  # fmt: skip


def is_writable(path: PurePosixPath) -> bool:
    """Whether an absolute path lies in one of the directories.

    >>> is_writable(PurePosixPath("/app/data")), is_writable(PurePosixPath("/etc/app"))
    (True, False)
    """
    return len(path.parts) > 1 and path.parts[1] in WRITABLE and ".." not in path.parts
