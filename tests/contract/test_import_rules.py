"""The dependency rules hold: the contracts of pyproject.toml, and the modules that the import of a service loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HEAVY = ("torch", "transformers", "sglang", "jwt")  # the last one, with what checks keys, only in processes with keys
# What `--help`, a bad flag and every other process must not wait for.
LIGHT_MODULES = [
    "services.orchestrator.app",
    "services.orchestrator.__main__",
    "services.envgateway.app",
    "services.envgateway.__main__",
    "services.cli.__main__",
    "services.inference.__main__",
    "services.trainer.__main__",
    "services.common.rpc.server",
    "services.common.rpc.client",
    "services.common.rpc.run_client",
]


def test_the_import_contracts_are_kept(repository: Path) -> None:
    command = Path(sys.executable).parent / "lint-imports"
    answer = subprocess.run(
        [str(command), "--no-cache"], cwd=repository, check=False, capture_output=True, text=True, timeout=120
    )
    assert answer.returncode == 0, answer.stdout[answer.stdout.find("Contracts") :]


def test_importing_loads_nothing_heavy(repository: Path) -> None:
    program = (
        f"import importlib, sys; [importlib.import_module(name) for name in {LIGHT_MODULES!r}]; "
        f"print(*sorted({{name.partition('.')[0] for name in sys.modules}} & set({HEAVY!r})))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program], cwd=repository, check=False, capture_output=True, text=True, timeout=120
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.split() == []
