"""One task directory: its settings, its instruction, and the files of its environment and its tests.

Reads the directory when asked and keeps nothing. A task that needs more than files and commands is refused: several steps,
services beside the agent, graphics cards, a verifier elsewhere.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from services.common.errors import DatasetError

# --- Directories below the root that a Harbor task may write; each is a part of the work dir of its sandbox.


ENVIRONMENT = "harbor"  # the gateway's environment that plays the tasks
SCORED_AT_END = frozenset({ENVIRONMENT})  # environments that give their reward at an action that asks for nothing
TESTS, LOGS, SOLUTION = "/tests", "/logs", "/solution"
WRITABLE = (
    "app", "build", "code", "data", "home", "input", "logs", "mnt", "opt", "oracle", "output", "project", "repo", "root", "solution",
    "src", "srv", "testbed", "tests", "tmp", "workdir", "workspace",
)  # fmt: skip


def is_writable(path: PurePosixPath) -> bool:
    """Whether an absolute path lies in one of the directories.

    >>> is_writable(PurePosixPath("/app/data")), is_writable(PurePosixPath("/etc/app"))
    (True, False)
    """
    return len(path.parts) > 1 and path.parts[1] in WRITABLE and ".." not in path.parts


# --- Reads the part of a Dockerfile that needs no container engine.


_WITHOUT_EFFECT = ("FROM", "USER", "LABEL", "MAINTAINER", "EXPOSE", "CMD", "STOPSIGNAL", "HEALTHCHECK", "SHELL")
_FLAGS_WITHOUT_EFFECT = ("--chown=", "--link")
_VARIABLE = re.compile(r"\\\$|\$(?:\{([A-Za-z_]\w*)([^}]*)\}|([A-Za-z_]\w*))")
_ADDRESS = re.compile(r"^(?:[a-z]+://|git@)")
_SHOWN_CHARS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One COPY: patterns in the build context, and an absolute place. ``into``: the place is a directory."""

    line: int
    sources: tuple[str, ...]
    place: PurePosixPath
    into: bool


@dataclass(slots=True, kw_only=True)
class Dockerfile:
    workdir: PurePosixPath = field(default_factory=lambda: PurePosixPath("/app"))
    variables: dict[str, str] = field(default_factory=dict)
    copies: list[Copy] = field(default_factory=list)
    runs: list[str] = field(default_factory=list)  # "line 3: RUN apt-get ..."


def read_dockerfile(text: str, where: str) -> Dockerfile:
    """Read the text. Raises ``DatasetError`` with ``where``, line and instruction for one that cannot be honoured."""
    return _Reader(where).read(text)


class _Reader:
    def __init__(self, where: str) -> None:
        self._where = where
        self._found = Dockerfile()
        self._arguments: dict[str, str] = {}
        self._stages = 0

    def read(self, text: str) -> Dockerfile:
        for line, name, rest in _instructions(text):
            if name == "RUN":
                self._found.runs.append(f"line {line}: {_shown(f'RUN {rest}')}")
            elif name == "FROM":
                self._stages += 1
                if self._stages > 1:
                    raise self._refusal(line, name, rest, "a second stage needs a container engine")
            elif name in ("COPY", "ADD"):
                self._copy(line, name, rest)
            elif name == "WORKDIR":
                self._found.workdir = self._place(line, name, rest, self._value(line, name, rest, rest.strip()))
            elif name in ("ENV", "ARG"):
                self._set(line, name, rest)
            elif name not in _WITHOUT_EFFECT:
                raise self._refusal(line, name, rest, "needs a container engine")
        return self._found

    def _refusal(self, line: int, name: str, rest: str, why: str) -> DatasetError:
        return DatasetError(f"{self._where} line {line}: {_shown(f'{name} {rest}')}: {why}")

    def _value(self, line: int, name: str, rest: str, text: str) -> str:
        """The text with the values of ENV and ARG."""
        known = {**self._arguments, **self._found.variables}

        def replaced(match: re.Match[str]) -> str:
            if match[0] == r"\$":
                return "$"
            if match[2]:
                raise self._refusal(line, name, rest, f"{match[0]} is not understood: write the value")
            return known.get(match[1] or match[3], "")

        return _VARIABLE.sub(replaced, text)

    def _place(self, line: int, name: str, rest: str, text: str) -> PurePosixPath:
        place = self._found.workdir / text.strip("\"'")
        if not is_writable(place):
            raise self._refusal(
                line, name, rest, f"{place} is not in a directory that a task may write (docs/hub-environments.md)"
            )
        return place

    def _copy(self, line: int, name: str, rest: str) -> None:
        words = self._words(line, name, rest)
        while words and words[0].startswith("--"):
            if not words[0].startswith(_FLAGS_WITHOUT_EFFECT):
                raise self._refusal(line, name, rest, f"{words[0]} needs a container engine")
            words = words[1:]
        if len(words) < 2:
            raise self._refusal(line, name, rest, "needs a source and a place")
        *sources, target = words
        for source in sources:
            if _ADDRESS.match(source) or source.startswith("<<"):
                raise self._refusal(line, name, rest, "only files of the directory environment can be copied")
            if ".." in PurePosixPath(source).parts:
                raise self._refusal(line, name, rest, "a source outside of the directory environment")
            if name == "ADD" and source.endswith((".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")):
                raise self._refusal(line, name, rest, "an archive is not unpacked: add its files")
        into = target.endswith(("/", ".")) or len(sources) > 1
        place = self._place(line, name, rest, target)
        self._found.copies.append(Copy(line=line, sources=tuple(sources), place=place, into=into))

    def _words(self, line: int, name: str, rest: str) -> list[str]:
        try:
            words = json.loads(rest) if rest.lstrip().startswith("[") else shlex.split(rest)
        except ValueError as error:
            raise self._refusal(line, name, rest, f"cannot be read: {error}") from None
        if not all(isinstance(word, str) for word in words):
            raise self._refusal(line, name, rest, "must be a list of texts")
        return [self._value(line, name, rest, word) for word in words]

    def _set(self, line: int, name: str, rest: str) -> None:
        first = rest.split(None, 1)
        if name == "ENV" and len(first) == 2 and "=" not in first[0]:  # the old form: ENV KEY the value
            self._found.variables[first[0]] = self._value(line, name, rest, first[1])
            return
        for word in self._words(line, name, rest):
            key, given, value = word.partition("=")
            if name == "ENV":
                self._found.variables[key] = value
            elif given:
                self._arguments[key] = value


def _instructions(text: str) -> list[tuple[int, str, str]]:
    """Line number, name and rest of each instruction; comments and empty lines within one are left out."""
    found: list[tuple[int, str, str]] = []
    begun, parts, end_mark = 0, [], ""
    for number, line in enumerate(text.splitlines(), start=1):
        if end_mark:  # text in place
            end_mark = "" if line.strip() == end_mark else end_mark
            continue
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        begun = begun or number
        goes_on = line.rstrip().endswith("\\")
        parts.append(line.rstrip()[:-1] if goes_on else line)
        if goes_on:
            continue
        found.append(_split(begun, parts))
        mark = re.search(r"<<-?[\"']?(\w+)", found[-1][2])
        end_mark = mark[1] if mark and found[-1][1] in ("RUN", "COPY", "ADD") else ""
        begun, parts = 0, []
    return [*found, _split(begun, parts)] if parts else found


def _split(line: int, parts: list[str]) -> tuple[int, str, str]:
    name, _, rest = " ".join(part.strip() for part in parts).strip().partition(" ")
    return line, name.upper(), rest.strip()


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 3]}..."


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


# --- The files that a task's sandbox starts with, and those of its tests: path, mode and content, bounded.


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFile:
    """One entry; ``content`` is None for a directory and the target for a link."""

    place: PurePosixPath
    kind: str  # "file", "link" or "directory"
    mode: int = 0o755
    content: bytes = b""


def environment_files(task: HarborTask, most_bytes: int) -> list[TaskFile]:
    """The working directory and the files that COPY and ADD bring.

    Raises:
        DatasetError: a source that does not exist, or more than ``most_bytes``.
    """
    context = task.directory / "environment"
    found = [TaskFile(place=task.dockerfile.workdir, kind="directory")]
    for copy in task.dockerfile.copies:
        found += _copied(task.name, context, copy)
    return _bounded(task.name, found, most_bytes)


def verifier_files(task: HarborTask, most_bytes: int) -> list[TaskFile]:
    """The directory ``tests``, for the end of an episode."""
    return _bounded(task.name, _tree(task.directory / "tests", PurePosixPath(TESTS)), most_bytes)


def _copied(name: str, context: Path, copy: Copy) -> Iterator[TaskFile]:
    for pattern in copy.sources:
        relative = pattern.strip("/")
        sources = [context] if relative in ("", ".") else sorted(context.glob(relative))
        if not sources:
            raise DatasetError(f"task {name}: Dockerfile line {copy.line}: there is no {pattern} in environment")
        for source in sources:
            if not source.resolve().is_relative_to(context.resolve()):
                raise DatasetError(f"task {name}: Dockerfile line {copy.line}: {pattern} leads out of environment")
            is_tree = source.is_dir() and not source.is_symlink()
            into = (copy.into or len(sources) > 1) and not is_tree
            yield from _tree(source, copy.place / source.name if into else copy.place)


def _tree(top: Path, place: PurePosixPath) -> Iterator[TaskFile]:
    try:
        mode = os.lstat(top).st_mode
        if stat.S_ISLNK(mode):
            yield TaskFile(place=place, kind="link", content=os.fsencode(os.readlink(top)))
        elif stat.S_ISDIR(mode):
            yield TaskFile(place=place, kind="directory", mode=stat.S_IMODE(mode) | 0o700)
            for path in sorted(top.iterdir()):
                yield from _tree(path, place / path.name)
        elif stat.S_ISREG(mode):
            yield TaskFile(place=place, kind="file", mode=stat.S_IMODE(mode) | 0o600, content=top.read_bytes())
    except OSError as error:
        raise DatasetError(f"{top} cannot be read: {error.strerror}") from error


def _bounded(name: str, files: Iterable[TaskFile], most_bytes: int) -> list[TaskFile]:
    """Stops at the file that passes the bound; the files before it are not kept by anyone else."""
    found, total = [], 0
    for file in files:
        total += len(file.content)
        if total > most_bytes:
            raise DatasetError(f"task {name}: its files are larger than {most_bytes} bytes: leave some of them out")
        found.append(file)
    return found
