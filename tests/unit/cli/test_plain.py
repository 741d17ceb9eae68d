"""Sentences on the terminal: what a peer or a path says is no markup."""

from __future__ import annotations

import pytest
from rich.console import Console

from services.cli.console.plain import say


@pytest.mark.parametrize(
    "text", ["runs/[bold]x[/bold]: [1, 2]", "[/]", "[link=file:///etc]a[/link]", "a " * 200 + "b", ""]
)
def test_a_text_is_printed_as_it_is_in_one_line(text: str) -> None:
    console = Console(record=True, width=40, force_terminal=True)
    say(console, text, "bold red")
    assert console.export_text() == f"{text}\n"
