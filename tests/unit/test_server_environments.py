"""The environments of engines' servers can be installed: every line of the Makefile and of SkyPilot's setup resolves.

uv resolves for Linux x86-64 with the metadata of the package index; nothing is installed.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from extras.deploy.command import write_deployment as deploy
from services.common.installing import COMPLETE
from tests import needs

REPOSITORY = Path(__file__).resolve().parents[2]
LOCKS = {
    "sglang": REPOSITORY / "deploy/docker/inference-sglang.constraints.txt",
    "vllm": REPOSITORY / "extras/vllm/server/constraints.txt",
}


def resolve(python: str, requirement: str, *options: str) -> dict[str, str]:
    """Names and versions."""
    done = subprocess.run(
        [*needs.UV, "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--python-version", python,
         "--python-platform", "x86_64-manylinux_2_34", *options, "-"],
        cwd=REPOSITORY, input=requirement, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line.partition(";")[0].strip() for line in done.stdout.splitlines() if "==" in line]
    return {name: version for name, _, version in (line.partition("==") for line in lines)}


def made_by(target: str) -> list[list[str]]:
    """The commands of a target, as words."""
    done = subprocess.run(
        ["make", "--dry-run", "--always-make", "--no-print-directory", target], cwd=REPOSITORY, capture_output=True, text=True,
        check=True, timeout=60, env={**os.environ, "PYTHON": "python3"},
    )  # fmt: skip
    return [shlex.split(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.needs("package index")
@pytest.mark.parametrize(("engine", "python"), [("sglang", "3.11"), ("vllm", "3.13")])
def test_what_make_installs_for_gpus_resolves_to_its_pins_alone(engine: str, python: str) -> None:
    (command,) = (words for words in made_by(f"{engine}-env") if "install" in words)
    assert command[0] == f".venv-{engine}/bin/python" and command[-1] == engine
    lock = command[command.index("--constraint") + 1]
    assert REPOSITORY / lock == LOCKS[engine]
    found = resolve(python, engine, "--no-config", "--constraint", lock)
    pins = dict(line.lower().split("==") for line in Path(REPOSITORY / lock).read_text().splitlines() if "==" in line)
    pins = {name.replace("_", "-"): version for name, version in pins.items()}
    assert found.items() <= pins.items() and engine in found and "torch" in found


@pytest.mark.slow
@pytest.mark.needs("package index")
@pytest.mark.parametrize("engine", ["vllm"])
def test_what_skypilot_installs_in_a_checkout_resolves(engine: str, tmp_path: Path) -> None:
    settings = [f"inference.a.engine={engine}", "inference.a.device=auto"]
    deploy(REPOSITORY / "recipes" / "quickstart", "skypilot", tmp_path, settings, None, "L4")
    setup = yaml.safe_load((tmp_path / "task.yaml").read_text())["setup"]
    commands = [shlex.split(line) for line in setup.splitlines() if "-m uv pip install" in line]
    assert len(commands) == 2 and f"touch .venv-{engine}/{COMPLETE}" in setup
    for command in commands:
        place, constraint = command[command.index("--python") + 1], command[command.index("--constraint") + 1]
        config = [word for word in command if word == "--no-config"]
        python = "3.12" if place.startswith(f".venv-{engine}") else "3.11"
        found = resolve(python, command[-1], *config, "--constraint", constraint)
        assert ("transformers" in found) and (engine in found) == (python == "3.12")


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_the_last_line_of_a_target_says_that_the_environment_is_complete(engine: str) -> None:
    for suffix in ("", "-cpu"):
        assert made_by(f"{engine}{suffix}-env")[-1] == ["touch", f".venv-{engine}{suffix}/{COMPLETE}"]
