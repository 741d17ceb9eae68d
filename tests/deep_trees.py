"""Directories in directories, deeper than a stack, and a place from which they are removed.

They are not made under ``tmp_path``: pytest removes the folders of earlier runs by recursion, so one that a killed test
left there would end every later run with ``RecursionError``, after its tests and before their failures are printed.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.envgateway.sandbox.bare.slots import remove_tree


def make_deep(directory: Path, depth: int) -> None:
    """``depth`` directories, each in the one before."""
    here = os.open(directory, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=here)
        inner = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)


@pytest.fixture
def deep_path() -> Iterator[Path]:
    """Like ``tmp_path``, for deep trees."""
    path = Path(tempfile.mkdtemp(prefix="rollmill-deep-"))
    yield path
    remove_tree(str(path))
