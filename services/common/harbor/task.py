"""One task directory: its settings, its instruction, and the files of its environment and its tests.

Reads the directory when asked and keeps nothing. A task that needs more than files and commands is refused: several steps,
services beside the agent, graphics cards, a verifier elsewhere.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.errors import DatasetError
from services.common.harbor.dockerfile import Dockerfile, read_dockerfile

COLUMN = "harbor"  # of a row: {"directory": of the task, "run": what the machine must have, or empty}
TASK_FIELD = "task"  # of a row: the name of the directory
PARTS = ("task.toml", "instruction.md", "environment", "tests/test.sh")
_DEFAULT_TIMEOUT_S = 600.0  # the format's own
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True, slots=True, kw_only=True)
class HarborTask:
    name: str
    directory: Path
    instruction: str
    dockerfile: Dockerfile
    run: str  # the first thing that only a container engine could prepare; empty for none
    agent_s: float
    verifier_s: float
    memory_bytes: int | None
    storage_bytes: int | None
    verifier_variables: Mapping[str, str]


def rows(directory: str) -> Iterator[dict[str, Any] | DatasetError]:
    """A row ``{"task", "prompt", "harbor"}`` for each subdirectory with a ``task.toml``, in the order of their names; or
    the error that leaves the task out.

    Raises:
        DatasetError: there is no such directory, or none of its subdirectories is a task.
    """
    root = Path(directory)
    if not root.is_dir():
        raise DatasetError(
            f"there is no directory {root.absolute()} (harbor): write the directory that holds the tasks"
        )
    found = sorted(path for path in root.iterdir() if (path / "task.toml").is_file())
    if not found:
        raise DatasetError(
            f"no subdirectory of {root.absolute()} (harbor) has a task.toml: write the directory above the tasks"
        )
    for path in found:
        try:
            task = read_task(path)
        except DatasetError as error:
            yield error
            continue
        place = {"directory": str(path.absolute()), "run": task.run}
        yield {TASK_FIELD: task.name, "prompt": task.instruction, COLUMN: place}


def read_task(directory: Path) -> HarborTask:
    """Read a task. Raises ``DatasetError`` that names the task and what is missing or cannot be had here."""
    name = directory.name
    # A pipe exists as well, and a read of it never ends.
    missing = [part for part in PARTS if not ((directory / part).is_file() or (directory / part).is_dir())]
    if missing:
        raise DatasetError(f"task {name}: missing {', '.join(missing)} in {directory}")
    for part in (*PARTS, "environment/Dockerfile"):
        if not (directory / part).resolve().is_relative_to(directory.resolve()):
            raise DatasetError(f"task {name}: {part} is a link to a place outside of {directory}: put a file there")
    try:
        settings = tomllib.loads((directory / "task.toml").read_text(encoding="utf-8"))
        instruction = (directory / "instruction.md").read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise DatasetError(f"task {name}: cannot be read: {error}") from None
    if not instruction.strip():
        raise DatasetError(f"task {name}: instruction.md is empty")
    environment, verifier = _section(settings, "environment", name), _section(settings, "verifier", name)
    _refuse_what_needs_more(name, directory, settings, environment, verifier)
    dockerfile, run = _dockerfile(name, directory, environment)
    dockerfile.variables.update(_variables(environment, "environment", name))
    return HarborTask(
        name=name,
        directory=directory,
        instruction=instruction,
        dockerfile=dockerfile,
        run=run,
        agent_s=_seconds(_section(settings, "agent", name), "agent", name),
        verifier_s=_seconds(verifier, "verifier", name),
        memory_bytes=_bytes(environment, "memory", name),
        storage_bytes=_bytes(environment, "storage", name),
        verifier_variables=_variables(verifier, "verifier", name),
    )


def needs_programs(name: str, run: str) -> str:
    """The refusal of a task that only a container engine could prepare."""
    return (
        f"task {name}: {run}: needs a container engine; where the programs are on the gateway's machine already, write "
        "envgateway.harbor.skip_run: true"
    )


def _dockerfile(name: str, directory: Path, environment: Mapping[str, Any]) -> tuple[Dockerfile, str]:
    path = directory / "environment" / "Dockerfile"
    image = environment.get("docker_image")
    if not path.is_file() and image is None:
        raise DatasetError(f"task {name}: missing environment/Dockerfile in {directory}")
    try:
        read = read_dockerfile(path.read_text("utf-8"), f"task {name}: Dockerfile") if path.is_file() else Dockerfile()
    except (OSError, ValueError) as error:
        raise DatasetError(f"task {name}: cannot be read: {error}") from None
    if image is not None:
        return read, f"task.toml: environment.docker_image {image}"
    return read, f"Dockerfile {read.runs[0]}" if read.runs else ""


def _refuse_what_needs_more(
    name: str,
    directory: Path,
    settings: Mapping[str, Any],
    environment: Mapping[str, Any],
    verifier: Mapping[str, Any],
) -> None:
    beside = [part for part in ("docker-compose.yaml", "docker-compose.yml", ".dockerignore")
              if (directory / "environment" / part).exists()]  # fmt: skip
    wrong = {
        "task.toml: steps: a task of several steps": bool(settings.get("steps")),
        f"environment/{', '.join(beside)}: not read here": bool(beside),
        "task.toml: environment.gpus": bool(environment.get("gpus")),
        "task.toml: environment.mcp_servers": bool(environment.get("mcp_servers")),
        "task.toml: environment.os": str(environment.get("os", "linux")).lower() != "linux",
        "task.toml: verifier.environment_mode": verifier.get("environment_mode", "shared") != "shared",
        "task.toml: verifier.import_path": bool(verifier.get("import_path")),
    }
    found = [what for what, is_so in wrong.items() if is_so]
    if found:
        raise DatasetError(f"task {name}: {'; '.join(found)}: needs a container engine, or Harbor itself")


def _section(settings: Mapping[str, Any], section: str, name: str) -> Mapping[str, Any]:
    found = settings.get(section, {})
    if not isinstance(found, dict):
        raise DatasetError(f"task {name}: task.toml: {section} is {found!r:.50}; must be a table")
    return found


def _seconds(section: Mapping[str, Any], where: str, name: str) -> float:
    value = section.get("timeout_sec", _DEFAULT_TIMEOUT_S)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise DatasetError(
            f"task {name}: task.toml: {where}.timeout_sec is {value!r}; must be a number of seconds above 0"
        )
    return float(value)


def _bytes(section: Mapping[str, Any], what: str, name: str) -> int | None:
    """``memory_mb = 2048``, or the older ``memory = "2G"``."""
    megabytes, text = section.get(f"{what}_mb"), section.get(what)
    if isinstance(megabytes, int) and not isinstance(megabytes, bool) and megabytes > 0:
        return megabytes << 20
    if megabytes is None and text is None:
        return None
    unit = _UNITS.get(str(text)[-1:].upper())
    number = str(text)[:-1]
    if megabytes is not None or unit is None or not number.isdecimal() or not int(number):
        raise DatasetError(
            f"task {name}: task.toml: environment.{what} is {text if megabytes is None else megabytes!r}; write {what}_mb = 2048"
        )
    return int(number) * unit


def _variables(section: Mapping[str, Any], where: str, name: str) -> dict[str, str]:
    found = section.get("env", {})
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise DatasetError(f"task {name}: task.toml: {where}.env must be a table of texts")
    for key, value in found.items():
        if "${" in value:
            raise DatasetError(
                f"task {name}: task.toml: {where}.env.{key} reads a variable of the machine ({value}): write its value"
            )
    return dict(found)
