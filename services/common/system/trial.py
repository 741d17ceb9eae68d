"""The answer of a process that tries whether a service can use a model: the command line imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn

from services.common.errors import UserError
from services.common.system.child import run_and_leave

REFUSED = 2  # exit code; the reason is the last line of stderr


def answer(trial: Callable[[], str]) -> NoReturn:
    """Write the note that ``trial`` returns to stdout. A ``UserError`` refuses; any other error is its failure."""

    def main() -> int:
        try:
            sys.stdout.write(trial())
        except UserError as error:
            sys.stderr.write(f"{error.message}\n")
            return REFUSED
        return 0

    run_and_leave(main)
