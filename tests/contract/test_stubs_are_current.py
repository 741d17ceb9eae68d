"""The committed stubs equal the output of protos/generate.py, and buf lint reports no fault."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def test_stubs_are_current(repository: Path, tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, str(repository / "protos" / "generate.py"), str(tmp_path)],
        check=True,
        capture_output=True,
        timeout=120,
    )
    committed = {path.name: path.read_text() for path in (repository / "services/common/pb").glob("*_pb2*")}
    generated = {path.name: path.read_text() for path in tmp_path.glob("*_pb2*")}
    assert sorted(committed) == sorted(generated)
    stale = [name for name, text in generated.items() if committed[name] != text]
    assert stale == [], "run `make protos`"


@pytest.mark.parametrize("arguments", [("lint",), ("format", "--diff", "--exit-code")], ids=["lint", "format"])
def test_buf_accepts_the_protos(repository: Path, arguments: tuple[str, ...]) -> None:
    buf = Path(sys.executable).parent / "buf"
    answer = subprocess.run(
        [str(buf), *arguments, "protos"], cwd=repository, check=False, capture_output=True, text=True, timeout=120
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
