"""The launch scripts: each passes a shell check, prints its usage, and names its variables in the header."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.needs import installed
from tests.waiting import PROCESS_S

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPTS = sorted([*(REPOSITORY / "deploy" / "launch").glob("*.sh"), REPOSITORY / "recipes" / "run.sh"])
NUMBERED = [script for script in SCRIPTS if script.name[0].isdigit()]


@pytest.mark.needs("shellcheck")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_it_passes_shellcheck(script: Path) -> None:
    done = subprocess.run([str(installed("shellcheck")), str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_its_header_lists_its_variables(script: Path) -> None:
    header = "".join(line for line in script.read_text().splitlines(keepends=True) if line.startswith("#"))
    assert script.stat().st_mode & 0o111, "not executable"
    assert "Variables: " in header
    body = script.read_text()
    for variable in re.findall(r"\$\{([A-Z][A-Z_0-9]+):?[-?=]", body):
        assert variable in header or variable in ("PYTHON", "OMP_NUM_THREADS"), f"{variable} is not in the header"


@pytest.mark.parametrize("script", [*NUMBERED, REPOSITORY / "recipes" / "run.sh"], ids=lambda path: path.name)
def test_without_a_recipe_it_says_how_it_is_used(script: Path) -> None:
    done = subprocess.run([str(script)], capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "usage: " in done.stderr and "RECIPE" in done.stderr


def test_the_judge_that_is_told_to_end_between_a_start_and_its_entry_leaves_no_process(tmp_path: Path) -> None:
    told, python = tmp_path / "told", tmp_path / "python"
    told.write_text(
        'case "$0" in */judge_api.sh) set -o functrace; '
        "trap 'case \"$BASH_COMMAND\" in port_of*) kill -TERM $$ ;; esac' DEBUG ;; esac"
    )
    python.write_text(f"#!/bin/sh\nexec sleep {2 * PROCESS_S:g}\n")
    python.chmod(0o755)
    variables = {"BASH_ENV": str(told), "PYTHON": str(python), "REDIS_URI": "redis://127.0.0.1:1"}
    script = str(REPOSITORY / "deploy" / "launch" / "judge_api.sh")
    done = subprocess.run(  # which also waits for all that hold its output
        [script], env=os.environ | variables, capture_output=True, text=True, check=False, timeout=PROCESS_S
    )
    assert done.returncode == 0, done.stderr
