"""Reads the part of a Dockerfile that needs no container engine.

honoured   WORKDIR, COPY and ADD of files of the build context, ENV, ARG with a default
no effect  FROM (once), USER, LABEL, MAINTAINER, EXPOSE, CMD, STOPSIGNAL, HEALTHCHECK, SHELL
told       RUN: the caller decides whether the machine has what it would install
refused    all others, flags of COPY other than --chown and --link, addresses, text in place
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from services.common.errors import DatasetError
from services.common.harbor.places import is_writable

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
