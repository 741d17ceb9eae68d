"""Command lines answer help, mistakes and checks without importing torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from services.trainer.config import parse
from tests.waiting import PROCESS_S


@pytest.mark.parametrize("module", ["services.trainer", "services.trainer.warm_start", "services.trainer.launch_ranks"])
def test_help_teaches_without_importing_torch(module: str) -> None:
    code = (
        f"import runpy, sys; sys.argv = [{module!r}, '--help']\n"
        "try:\n"
        f"    runpy.run_module({module!r}, run_name='__main__')\n"
        "except SystemExit as left:\n"
        "    assert left.code == 0\n"
        "heavy = {'torch', 'transformers', 'grpc'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PROCESS_S, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage: python -m services.trainer" in done.stdout


def test_a_missing_argument_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--policy", "p"])
    assert "--orchestrator" in capsys.readouterr().err
