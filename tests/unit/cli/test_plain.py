"""Sentences on the terminal: what a peer or a path says is no markup."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from services.cli.console import say, tell
from services.common.errors import ConfigError


@pytest.mark.parametrize(
    "text", ["runs/[bold]x[/bold]: [1, 2]", "[/]", "[link=file:///etc]a[/link]", "a " * 200 + "b", ""]
)
def test_a_text_is_printed_as_it_is_in_one_line(text: str) -> None:
    console = Console(record=True, width=40, force_terminal=True)
    say(console, text, "bold red")
    assert console.export_text() == f"{text}\n"


def test_the_text_of_an_error_controls_no_terminal() -> None:
    written = io.StringIO()
    console = Console(file=written, width=200)
    tell(ConfigError("recipe.yaml cannot run:\n  ru\x1b[2Jn\u202ex: no such setting"), console)
    assert written.getvalue() == "error: recipe.yaml cannot run:\n  ru\\x1b[2Jn\\x202ex: no such setting\n"
