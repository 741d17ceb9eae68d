"""The help of every command."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from services.cli.__main__ import app


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    yield path, group.help or ""
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*path, name))


@pytest.mark.parametrize(("path", "text"), [*commands(typer.main.get_command(app))], ids=lambda value: "-".join(value))
def test_each_example_of_a_command_has_a_line_of_its_own(path: tuple[str, ...], text: str) -> None:
    shown = CliRunner(env={"COLUMNS": "120", "TERM": "dumb"}).invoke(app, [*path, "--help"]).output
    lines = [line.strip() for line in shown.splitlines()]
    for example in re.findall(r"^ {4,}(rollmill .*?)(?: {2,}.*)?$", text, re.MULTILINE):
        assert any(line == example or line.startswith(f"{example}  ") for line in lines), example
