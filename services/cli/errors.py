"""How the command line tells an error: what happened and what to do, without a trace."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from services.common.errors import MillraceError, UserError


class Interrupted(Exception):
    """Somebody pressed Ctrl-C, or asked us to stop."""


def exit_code(error: MillraceError) -> int:
    """2 for a mistake that the caller can mend, 1 for what went wrong on the way."""
    return 2 if isinstance(error, UserError) else 1


def tell(error: MillraceError, console: Console) -> None:
    console.print(Text.assemble(("error: ", "bold red"), error.message), soft_wrap=True)
