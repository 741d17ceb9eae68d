"""The dependency rules hold: the contracts of pyproject.toml, and the modules that the import of a service loads."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_importing_loads_nothing_heavy(repository: Path, module: str) -> None:
    program = (
        f"import importlib, sys; importlib.import_module({module!r}); "
        f"print(*sorted({{name.partition('.')[0] for name in sys.modules}} & set({HEAVY!r})))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program], cwd=repository, check=False, capture_output=True, text=True, timeout=120
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.split() == []


def test_common_is_importable_piece_by_piece(repository: Path) -> None:
    """An import in ``services/common/__init__.py`` would load one service's needs into all."""
    for package in ("services", "services/common", "services/common/rpc"):
        text = (repository / package / "__init__.py").read_text()
        statements = [type(statement).__name__ for statement in ast.parse(text).body]
        assert set(statements) <= {"Expr"}, f"{package}/__init__.py"


@pytest.mark.parametrize(
    ("client", "some"),
    [
        ("services/inference/engine/sglang.py", {"/generate", "/update_weights_from_disk", "/pause_generation"}),
        ("extras/vllm/engine.py", {"/inference/v1/generate", "/update_weights", "/pause", "/resume"}),
    ],
)
def test_one_module_alone_speaks_to_a_server_program(repository: Path, client: str, some: set[str]) -> None:
    """Its routes stand in the engine's client, so that another version of the program changes one file."""
    routes = set(re.findall(r'"(/[a-z0-9_/]+)', (repository / client).read_text())) - {"/health", "/metrics"}
    assert some <= routes
    elsewhere = {
        f"{path.relative_to(repository)}: {route}"
        for path in (repository / "services").rglob("*.py")
        if path != repository / client
        for route in routes
        if f'"{route}"' in path.read_text()
    }
    assert elsewhere == set()
