"""Processes of a run may open as many files as the hard limit allows, whatever the shell begins with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.common.system.child import module_command

REPOSITORY = Path(__file__).parents[3]
PROBE = "import resource\nprint(*resource.getrlimit(resource.RLIMIT_NOFILE))\n"
CLI = """\
import resource, sys
from services.cli.__main__ import main
sys.argv = ["rollmill", "--version"]
try:
    main()
except SystemExit:
    print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize("kind", ["service", "launcher"])
def test_the_soft_limit_of_open_files_is_raised_to_the_hard_one(tmp_path: Path, kind: str) -> None:
    (tmp_path / "probe.py").write_text(PROBE)
    command = list(module_command("probe")) if kind == "service" else [sys.executable, "-c", CLI]
    limited = ["/bin/bash", "-c", 'ulimit -Sn 128 && ulimit -Hn 512 && exec "$@"', "bash", *command]
    done = subprocess.run(
        limited,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "512 512"
