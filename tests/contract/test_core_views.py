"""The parts of the orchestrator's core are read by its wiring alone; every other module gets those that it needs."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

CORE, WIRING = "core.py", "wiring.py"
IMPORTERS = {"app.py", WIRING}  # the process makes the core, the wiring takes it apart
ALLOWED: set[str] = set()  # reads of a part elsewhere, as "file: core.part"


def is_core(node: ast.expr) -> bool:
    """Whether an expression is named like the core: ``core``, ``self.core``, ``world._core``."""
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name.lstrip("_") == "core"


def reads_of_core(source: str) -> Iterator[str]:
    """Names of the attributes that a module reads of a core."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and is_core(node.value):
            yield node.attr


def imports_core(source: str) -> bool:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            named = {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
        elif isinstance(node, ast.Import):
            named = {alias.name for alias in node.names}
        else:
            continue
        if "services.orchestrator.core" in named:
            return True
    return False


def events_of(source: str) -> set[str]:
    """Public methods and properties of the core: what it offers instead of its parts."""
    (core,) = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in core.body if isinstance(node, kinds) and not node.name.startswith("_")}


@pytest.fixture
def service(repository: Path) -> Path:
    return repository / "services" / "orchestrator"


def modules(service: Path) -> dict[str, str]:
    return {path.relative_to(service).as_posix(): path.read_text() for path in service.rglob("*.py")}


def test_only_the_wiring_reads_the_parts_of_the_core(service: Path) -> None:
    events = events_of((service / CORE).read_text())
    found = {
        f"{file}: core.{name}"
        for file, source in modules(service).items()
        if file not in (CORE, WIRING)
        for name in reads_of_core(source)
        if name not in events
    }
    assert found == ALLOWED


def test_tests_read_the_views_and_not_the_core(service: Path, repository: Path) -> None:
    """Only the world of the tests makes a core; a changed inside of the core changes no other test."""
    events = events_of((service / CORE).read_text())
    tests = repository / "tests" / "unit" / "orchestrator"
    found = {
        f"{path.relative_to(tests)}: core.{name}"
        for path in tests.rglob("*.py")
        if path.name != "world.py"
        for name in reads_of_core(path.read_text())
        if name not in events
    }
    assert found == set()


def test_only_the_process_and_the_wiring_import_the_core(service: Path) -> None:
    assert {file for file, source in modules(service).items() if imports_core(source)} == IMPORTERS


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("core.pool.num_running", ["pool"]),
        ("pool = core.pool", ["pool"]),
        ("def f(self): return self._core.journal.blocked", ["journal"]),
        ("for replica in self.core.pool: pass", ["pool"]),
        ("await core.until(lambda: core.control.ended)", ["until", "control"]),
        ("parts.pool.num_running; score.value", []),
    ],
)
def test_reads_of_a_core_are_found_under_each_of_its_names(source: str, expected: list[str]) -> None:
    assert sorted(reads_of_core(f"async def g():\n    {source}" if "await" in source else source)) == sorted(expected)


@pytest.mark.parametrize(
    "source",
    [
        "from services.orchestrator.core import OrchestratorCore",
        "from services.orchestrator import core",
        "import services.orchestrator.core",
        "if TYPE_CHECKING:\n    from services.orchestrator.core import OrchestratorCore",
    ],
)
def test_an_import_of_the_core_is_found_in_each_of_its_forms(source: str) -> None:
    assert imports_core(source)
    assert not imports_core(source.replace("core", "config"))
