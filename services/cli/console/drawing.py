"""matplotlib for pictures in files; imported on first use, because the import takes a second."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from rich.console import Console

from services.cli.console.plain import say
from services.common.errors import ConfigError

T = TypeVar("T")


def pyplot() -> Any:
    """matplotlib's ``pyplot``, which needs no screen here. Raises ``ConfigError`` if not installed."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"a picture needs the package {error.name}, which is not installed here: pip install matplotlib (the extra "
            "`plot`), or copy the run's directory to where it is and draw there with `rollmill plot`"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def percent() -> Any:
    """A formatter of an axis of shares."""
    from matplotlib.ticker import PercentFormatter

    return PercentFormatter(1.0)


def thousands() -> Any:
    """A formatter of large numbers with a prefix: 150k, 2M."""
    from matplotlib.ticker import EngFormatter

    return EngFormatter(sep="")


def drawn(draw: Callable[[], T], console: Console) -> T | None:
    """The result of ``draw``; or None and the reason if no picture can be made, because no command fails for a missing
    picture."""
    try:
        return draw()
    except ConfigError as error:
        say(console, f"no picture: {error.message}", "yellow")
        return None
