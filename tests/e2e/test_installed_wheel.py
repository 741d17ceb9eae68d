"""The wheel in a fresh environment, used outside the checkout: its files, the command, a run of a recipe that comes with it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.e2e.conftest import REPOSITORY, RUN_TIMEOUT_S

pytestmark = pytest.mark.slow
PACKAGES = ("services", "extras", "rollmill", "recipes")
# For readers of a checkout: guides of the code, and a script that starts what lies beside it.
LEFT_OUT = {
    *REPOSITORY.glob("services/**/README.md"),
    *REPOSITORY.glob("extras/**/README.md"),
    *REPOSITORY.glob("extras/*/tests/**/*"),
    REPOSITORY / "recipes" / "run.sh",
}


def ask(*command: str | Path, here: Path) -> subprocess.CompletedProcess[str]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "ROLLMILL"))}
    return subprocess.run(
        [str(part) for part in command], cwd=here, env={**variables, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False,
    )  # fmt: skip


def answer(*command: str | Path, here: Path) -> str:
    done = ask(*command, here=here)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built of a copy: setuptools writes beside the sources."""
    copy, out = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("wheel")
    for name in PACKAGES:
        shutil.copytree(REPOSITORY / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, copy)
    answer(
        sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation", "-w", out, copy,
        here=copy,
    )  # fmt: skip
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def bin_folder(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that holds the wheel, and sees the packages of this one but not the checkout: the
    files of a folder on the path that link to others are not read."""
    place = tmp_path_factory.mktemp("environment")
    venv.create(place, symlinks=True)
    python = place / "bin" / "python"
    answer(
        sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps", wheel,
        here=place,
    )  # fmt: skip
    own = Path(answer(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", here=place).strip())
    (own / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return place / "bin"


def test_the_wheel_has_every_file_that_code_and_recipes_read(wheel: Path) -> None:
    there = set(zipfile.ZipFile(wheel).namelist())
    files = [file for name in PACKAGES for file in (REPOSITORY / name).rglob("*") if file.is_file()]
    wanted = {file for file in files if "__pycache__" not in file.parts} - LEFT_OUT
    assert {file.relative_to(REPOSITORY).as_posix() for file in wanted} <= there
    assert {name.partition("/")[0] for name in there if ".dist-info/" not in name} == set(PACKAGES)


def test_an_installed_rollmill_makes_checks_and_runs_a_recipe_in_the_current_folder(
    bin_folder: Path, tmp_path: Path
) -> None:
    python, rollmill = bin_folder / "python", bin_folder / "rollmill"
    where = answer(
        python, "-c", "import rollmill, services; print(rollmill.__file__, services.__file__)", here=tmp_path
    )
    assert all(Path(file).is_relative_to(bin_folder.parent) for file in where.split())
    answer(rollmill, "new", "mine", here=tmp_path)
    assert "mine is ready to run" in answer(rollmill, "check", "mine", here=tmp_path)
    short = ["--set", "run.steps=2", "--set", "warm_start.model0.steps=2", "--set", "evaluation.at_start=false",
             "--set", "evaluation.at_end=false", "--set", "policies.model0.batch.size=16"]  # fmt: skip
    answer(rollmill, "run", "quickstart", *short, here=tmp_path)
    (summary,) = tmp_path.glob("runs/quickstart-*/summary.json")
    assert json.loads(summary.read_text())["state"] == "finished"


def test_a_command_that_takes_files_of_a_checkout_says_so(bin_folder: Path, tmp_path: Path) -> None:
    refused = ask(bin_folder / "rollmill", "deploy", "quickstart", "--target", "compose", "-o", "out", here=tmp_path)
    assert refused.returncode and "takes files of a checkout" in refused.stdout + refused.stderr
    answer(bin_folder / "rollmill", "deploy", "quickstart", "--target", "slurm", "-o", "out", here=tmp_path)
    assert "#SBATCH --nodes=1" in (tmp_path / "out" / "job.sbatch").read_text()
    assert "start quickstart orchestrator" in (tmp_path / "out" / "node0-orchestrator.sh").read_text()
