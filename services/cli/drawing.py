"""matplotlib for pictures that go into files; it is imported when one is drawn, because that takes a second."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from rich.console import Console

from services.common.errors import ConfigError

T = TypeVar("T")


def pyplot() -> Any:
    """matplotlib's ``pyplot``, which needs no screen here. Raises ``ConfigError`` where it is not installed."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"a picture needs the package {error.name}, which is not installed here: pip install matplotlib (the extra "
            "`plot`), or copy the run's directory to where it is and draw there with `millrace plot`"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def drawn(draw: Callable[[], T], console: Console) -> T | None:
    """What ``draw`` returns; None, and why, where no picture can be made: nothing else ends for want of one."""
    try:
        return draw()
    except ConfigError as error:
        console.print(f"no picture: {error.message}", style="yellow", markup=False, soft_wrap=True)
        return None
