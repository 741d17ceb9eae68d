"""The launch scripts: each passes a shell check, prints its usage, and names its variables in the header."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.needs import installed

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPTS = sorted([*(REPOSITORY / "deploy" / "launch").glob("*.sh"), REPOSITORY / "recipes" / "run.sh"])
NUMBERED = [script for script in SCRIPTS if script.name[0].isdigit()]


def test_these_are_the_numbered_scripts() -> None:
    assert [script.name for script in NUMBERED] == [
        "0_environment.sh",
        "1_inference_a.sh",
        "1_inference_b.sh",
        "2_orchestrator.sh",
        "3_trainer_model0.sh",
        "4_trainer_model1.sh",
    ]


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
