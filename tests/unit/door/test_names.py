"""The package ``rollmill``: its names, the modules that its import loads, and the package ``services`` that is found."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rollmill
from tests.waiting import PROCESS_S

REPOSITORY = Path(__file__).resolve().parents[3]


def python(code: str, where: Path, *path: Path) -> subprocess.CompletedProcess[str]:
    """Run a program in a folder outside the checkout."""
    environment = {"PYTHONPATH": ":".join(map(str, [*path, REPOSITORY])), "PATH": ""}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=where,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PROCESS_S,
        check=False,
    )


def test_every_name_is_there_and_in_the_docs() -> None:
    page = (REPOSITORY / "docs" / "reference" / "rollmill.md").read_text()
    assert sorted(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == rollmill.__all__
    for name in rollmill.__all__:
        assert getattr(rollmill, name) is not None


def test_a_name_that_is_not_there_is_told_with_those_that_are() -> None:
    with pytest.raises(AttributeError, match=r"rollmill has no 'Worklow'; it has ConfigError, Conversation"):
        rollmill.Worklow  # noqa: B018


def test_importing_it_loads_nothing_heavy(tmp_path: Path) -> None:
    heavy = "[m for m in ('torch', 'grpc', 'numpy', 'pydantic', 'google.protobuf') if m in sys.modules]"
    done = python(f"import sys, rollmill; print({heavy}); rollmill.Workflow; rollmill.tool; rollmill.Environment; "
                  "print([m for m in ('torch', 'grpc') if m in sys.modules])", tmp_path)  # fmt: skip
    assert (done.stdout, done.stderr) == ("[]\n[]\n", "")


def test_a_folder_services_of_the_user_neither_hides_ours_nor_is_hidden_without_a_word(tmp_path: Path) -> None:
    (tmp_path / "services").mkdir()
    (tmp_path / "services" / "__init__.py").write_text("MINE = True\n")
    done = python("import rollmill; print(rollmill.Task.__module__)", tmp_path, tmp_path)
    assert done.stdout == "services.common.records\n"
    assert f"{tmp_path}/services is hidden by Rollmill's own package `services`" in done.stderr
    done = python("import services; import rollmill", tmp_path, tmp_path)
    assert "another one is imported already" in done.stderr and str(tmp_path / "services") in done.stderr


def test_services_are_started_from_our_package_whatever_the_folder_holds(tmp_path: Path) -> None:
    from services.common.system.child import module_command, module_in

    (tmp_path / "services").mkdir()
    (tmp_path / "services" / "__init__.py").write_text("raise SystemExit('the folder of the user was imported')\n")
    command = module_command("services.orchestrator", "--help")
    assert module_in(command) == ("services.orchestrator", ("--help",))
    for path in ("", str(tmp_path)):  # also where PYTHONPATH names the user's folder
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env={"PYTHONPATH": path, "PATH": ""},
            capture_output=True,
            text=True,
            timeout=PROCESS_S,
            check=False,
        )
        assert done.returncode == 0 and "--run-dir" in done.stdout, done.stderr
    with pytest.raises(ValueError, match="no command line of module_command"):
        module_in([sys.executable, "-c", "pass", "x"])


def test_examples_import_rollmill_and_nothing_of_services() -> None:
    files = sorted((REPOSITORY / "examples").glob("*.py"))
    assert len(files) >= 8
    for file in files:
        tree = ast.parse(file.read_text())
        modules = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
        modules += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        assert not [module for module in modules if module.partition(".")[0] in ("services", "recipes", "tests")], file
