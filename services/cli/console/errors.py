"""Formats errors for the command line: the cause and the remedy, without a traceback."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from services.common.errors import MillraceError, UserError


class Interrupted(Exception):
    """The command was stopped by Ctrl-C or SIGTERM."""


def exit_code(error: MillraceError) -> int:
    """2 for an error that the caller can correct, 1 for any other."""
    return 2 if isinstance(error, UserError) else 1


def tell(error: MillraceError, console: Console) -> None:
    console.print(Text.assemble(("error: ", "bold red"), error.message), soft_wrap=True)
