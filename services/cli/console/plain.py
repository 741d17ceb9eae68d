"""Prints sentences as they are."""

from __future__ import annotations

from rich.console import Console


def say(console: Console, text: str, style: str | None = None, *, wrap: bool = False) -> None:
    """Print one text: brackets in it are no markup, and numbers are not coloured. Without ``wrap``, for commands and paths,
    only the terminal wraps it."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=not wrap)
