"""Runs a module of this package as ``python -m`` would: ``python -P services/start.py MODULE [ARGUMENTS]``.

``python -m services.x`` looks in the current directory first, where a user may have a folder ``services`` of his own. This file
takes the package that holds it, with any current directory and any PYTHONPATH. Imports the standard library alone.
"""

from __future__ import annotations

import contextlib
import importlib
import resource
import runpy
import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[1])


def raise_open_files() -> None:
    """Let this process and its children open as many files as the hard limit allows: each slot of a replica has a connection,
    and shells begin with 1,024."""
    with contextlib.suppress(OSError, ValueError):  # a hard limit above the kernel's own
        resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)


def main(module: str, arguments: list[str]) -> None:
    """Run ``module`` with these arguments. Modules of the user are found as before: ``services`` alone is fixed."""
    raise_open_files()
    installed = ROOT in sys.path
    sys.path.insert(0, ROOT)
    importlib.import_module("services")
    del sys.path[0]
    if not installed:
        sys.path.append(ROOT)  # a checkout that is not installed: `recipes` and `rollmill` lie beside `services`
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -P services/start.py MODULE [ARGUMENTS]")
    main(sys.argv[1], sys.argv[2:])
