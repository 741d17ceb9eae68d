"""One task directory of Harbor: its settings, its instruction, and the files of its environment and its tests.

Reads the directory when asked and keeps nothing. A task that needs more than files and commands is refused: several steps,
services beside the agent, graphics cards, a verifier elsewhere.
"""

from __future__ import annotations

import io
import shlex
import tarfile
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from string import Template
from typing import Any

from pydantic import BaseModel, ByteSize, Field, ValidationError

from services.common.config.data import DatasetConfig
from services.common.errors import DatasetError
from services.envgateway.sandbox.records import WRITABLE

TESTS, LOGS = "/tests", "/logs"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_FILES_BYTES = 32 << 20  # of a task's environment, and of its tests


# --- Reads the part of a Dockerfile that needs no container engine.


_WITHOUT_EFFECT = ("USER", "LABEL", "MAINTAINER", "EXPOSE", "CMD", "STOPSIGNAL", "HEALTHCHECK", "SHELL")
_SHOWN_CHARS = 100


@dataclass(slots=True)
class Dockerfile:
    workdir: PurePosixPath = field(default_factory=lambda: PurePosixPath("/app"))
    variables: dict[str, str] = field(default_factory=dict)
    copies: list[tuple[int, str, PurePosixPath, bool]] = field(
        default_factory=list
    )  # line, source, place, whether into it
    run: str = ""  # the first RUN: "line 3: RUN apt-get ..."


def read_dockerfile(text: str, where: str) -> Dockerfile:
    """WORKDIR, ENV and COPY of one stage. Raises ``DatasetError`` with ``where``, line and instruction for another
    instruction, RUN excepted."""
    found, stages, begun, parts = Dockerfile(), 0, 0, list[str]()
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        begun = begun or number
        parts.append(line.strip().removesuffix("\\").strip())
        if line.rstrip().endswith("\\") and number < len(lines):
            continue
        instruction, at, begun, parts = " ".join(parts), begun, 0, []
        name, _, rest = instruction.partition(" ")
        stages += name.upper() == "FROM"
        try:
            if stages > 1 or "<<" in rest:
                raise ValueError("a second stage, or text in place, needs a container engine")
            match name.upper():
                case "RUN":
                    found.run = found.run or f"line {at}: {instruction:.{_SHOWN_CHARS}}"
                case "WORKDIR":
                    found.workdir = _place(found, _filled(found, rest.strip(" \"'")))
                case "ENV":
                    given = [_filled(found, word).partition("=") for word in shlex.split(rest)]
                    found.variables |= {key: value for key, _, value in given}
                case "COPY":
                    words = [word for word in shlex.split(rest) if not word.startswith(("--chown=", "--link"))]
                    _copy(found, at, [_filled(found, word) for word in words])
                case "FROM":
                    pass
                case other if other not in _WITHOUT_EFFECT:
                    raise ValueError("needs a container engine")
        except ValueError as error:
            raise DatasetError(f"{where} line {at}: {instruction:.{_SHOWN_CHARS}}: {error}") from None
    return found


def _filled(found: Dockerfile, word: str) -> str:
    """The word with the values of ENV."""
    filled = Template(word).safe_substitute({"PATH": PATH, **found.variables})
    if "$" in filled:
        raise ValueError(f"{filled} is not understood: write the value")
    return filled


def _place(found: Dockerfile, text: str) -> PurePosixPath:
    place = found.workdir / text
    if not (len(place.parts) > 1 and place.parts[1] in WRITABLE and ".." not in place.parts):
        raise ValueError(f"{place} is not in a directory that a task may write (docs/hub-environments.md)")
    return place


def _copy(found: Dockerfile, line: int, words: list[str]) -> None:
    if flags := [word for word in words if word.startswith(("--", "["))]:
        raise ValueError(f"{flags[0]} needs a container engine")
    if len(words) < 2:
        raise ValueError("needs a source and a place")
    *sources, target = words
    if any(".." in PurePosixPath(source).parts for source in sources):
        raise ValueError("only files of the directory environment can be copied")
    into = target.endswith(("/", ".")) or len(sources) > 1
    found.copies += [(line, source, _place(found, target), into) for source in sources]


# --- Reads a task, and lists the tasks of a directory.


PARTS = ("task.toml", "instruction.md", "environment", "tests/test.sh")


class _Timed(BaseModel):
    timeout_sec: float = Field(default=600.0, gt=0, allow_inf_nan=False)  # the format's own default


class _Verifier(_Timed):
    env: dict[str, str] = {}


class _Environment(BaseModel):
    env: dict[str, str] = {}
    docker_image: str | None = None
    memory_mb: int | None = Field(default=None, gt=0)
    storage_mb: int | None = Field(default=None, gt=0)
    memory: ByteSize | None = None  # the older spelling
    storage: ByteSize | None = None


class _Settings(BaseModel):
    """What is read of task.toml."""

    agent: _Timed = _Timed()
    verifier: _Verifier = _Verifier()
    environment: _Environment = _Environment()


@dataclass(frozen=True, slots=True, kw_only=True)
class HarborTask:
    name: str
    directory: Path
    instruction: str
    dockerfile: Dockerfile
    refusal: str  # of a task that only a container engine could prepare; empty for others
    agent_s: float
    verifier_s: float
    memory_bytes: int | None
    storage_bytes: int | None
    verifier_variables: Mapping[str, str]


def rows(config: DatasetConfig, seed: int) -> Iterator[dict[str, Any] | DatasetError]:
    """A row ``{"task", "prompt", "harbor"}`` for each subdirectory with a ``task.toml``, in the order of their names; or
    the error that leaves the task out.

    Raises:
        DatasetError: there is no such directory, or none of its subdirectories is a task.
    """
    root = Path(config.harbor or "")
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
        place = {"directory": str(path.absolute()), "refusal": task.refusal}
        yield {"task": task.name, "prompt": task.instruction, "harbor": place}


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
    path = directory / "environment" / "Dockerfile"
    try:
        tree = tomllib.loads((directory / "task.toml").read_text(encoding="utf-8"))
        instruction = (directory / "instruction.md").read_text(encoding="utf-8")
        dockerfile = path.read_text(encoding="utf-8") if path.is_file() else ""
    except (OSError, ValueError) as error:
        raise DatasetError(f"task {name}: cannot be read: {error}") from None
    if not instruction.strip():
        raise DatasetError(f"task {name}: instruction.md is empty")
    settings = _settings(tree, name)
    environment = settings.environment
    if not path.is_file() and environment.docker_image is None:
        raise DatasetError(f"task {name}: missing environment/Dockerfile in {directory}")
    beside = [each for each in ("docker-compose.yaml", "docker-compose.yml", ".dockerignore")
              if (directory / "environment" / each).exists()]  # fmt: skip
    if beside:
        raise DatasetError(f"task {name}: environment/{beside[0]}: not read here: needs Harbor itself")
    read = read_dockerfile(dockerfile, f"task {name}: Dockerfile")
    read.variables.update(environment.env)
    image = f"task.toml: environment.docker_image {environment.docker_image}" if environment.docker_image else ""
    prepared = image or (read.run and f"Dockerfile {read.run}")
    refusal = (
        f"task {name}: {prepared}: needs a container engine; where the programs are on the gateway's machine already, write "
        "envgateway.harbor.skip_run: true"
    )
    return HarborTask(
        name=name,
        directory=directory,
        instruction=instruction,
        dockerfile=read,
        refusal=refusal if prepared else "",
        agent_s=settings.agent.timeout_sec,
        verifier_s=settings.verifier.timeout_sec,
        memory_bytes=environment.memory_mb << 20 if environment.memory_mb else environment.memory,
        storage_bytes=environment.storage_mb << 20 if environment.storage_mb else environment.storage,
        verifier_variables=settings.verifier.env,
    )


def _settings(tree: Mapping[str, Any], name: str) -> _Settings:
    """Raises ``DatasetError`` for values that cannot be kept, and keys that need more than files and commands."""
    try:
        settings = _Settings.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise DatasetError(f"task {name}: task.toml: {where} is {first['input']!r:.50}: {first['msg']}") from None
    environment, verifier = tree.get("environment", {}), tree.get("verifier", {})
    more = {
        "steps": tree.get("steps"),
        "environment.gpus": environment.get("gpus"),
        "environment.mcp_servers": environment.get("mcp_servers"),
        "environment.os": str(environment.get("os", "linux")).lower() != "linux",
        "verifier.environment_mode": verifier.get("environment_mode", "shared") != "shared",
        "verifier.import_path": verifier.get("import_path"),
    }
    if found := [key for key, value in more.items() if value]:
        raise DatasetError(f"task {name}: task.toml: {', '.join(found)}: needs a container engine, or Harbor itself")
    for where, variables in (("environment", settings.environment.env), ("verifier", settings.verifier.env)):
        if of_machine := [key for key, value in variables.items() if "${" in value]:
            key = f"{where}.env.{of_machine[0]}"
            raise DatasetError(f"task {name}: task.toml: {key} reads a variable of the machine: write its value")
    return settings


# --- The files that a task's sandbox starts with, and those of its tests, as an archive with paths below the root.


def environment_files(task: HarborTask) -> bytes:
    """The files that COPY brings.

    Raises:
        DatasetError: a source that does not exist, or too many bytes.
    """
    context = task.directory / "environment"

    def add(pack: Callable[[Path, PurePosixPath], None]) -> None:
        for line, pattern, place, into in task.dockerfile.copies:
            relative = pattern.strip("/")
            sources = [context] if relative in ("", ".") else sorted(context.glob(relative))
            if not sources:
                raise DatasetError(f"task {task.name}: Dockerfile line {line}: there is no {pattern} in environment")
            for source in sources:
                if not source.resolve().is_relative_to(context.resolve()):
                    raise DatasetError(f"task {task.name}: Dockerfile line {line}: {pattern} leads out of environment")
                below = (into or len(sources) > 1) and not (source.is_dir() and not source.is_symlink())
                pack(source, place / source.name if below else place)

    return _archive(task.name, add)


def verifier_files(task: HarborTask) -> bytes:
    """The directory ``tests``, for the end of an episode."""
    return _archive(task.name, lambda pack: pack(task.directory / "tests", PurePosixPath(TESTS)))


def _archive(name: str, add: Callable[[Callable[[Path, PurePosixPath], None]], None]) -> bytes:
    total = 0

    def kept(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        """Links are kept as links: what they lead to is not read. Pipes and devices are left out."""
        nonlocal total
        total += member.size
        if total > _FILES_BYTES:
            raise DatasetError(f"task {name}: its files are larger than {_FILES_BYTES >> 20} MiB")
        member.mode |= 0o700 if member.isdir() else 0o600
        return member if member.isreg() or member.isdir() or member.issym() or member.islnk() else None

    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        try:
            add(lambda source, place: archive.add(source, str(place), filter=kept))
        except OSError as error:
            raise DatasetError(f"task {name}: {error.filename} cannot be read: {error.strerror}") from error
    return packed.getvalue()
