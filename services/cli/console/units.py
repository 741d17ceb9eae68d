"""Numbers as people read them."""

from __future__ import annotations


def format_bytes(size: float) -> str:
    """
    >>> format_bytes(1536)
    '1.5 KiB'
    """
    sign, size = ("-" if size < 0 else ""), abs(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{sign}{size:.0f} B" if unit == "B" else f"{sign}{size:.1f} {unit}"
        size /= 1024
    return f"{sign}{size:.1f} TiB"


def format_change(value: float, low: float, high: float, digits: int = 3) -> str:
    """A difference with its interval.

    >>> format_change(0.25, -0.125, 0.625)
    '+0.250 (-0.125..+0.625)'
    """
    return f"{value:+.{digits}f} ({low:+.{digits}f}..{high:+.{digits}f})"


def format_reward(value: float | None, digits: int = 3) -> str:
    """
    >>> format_reward(0.25), format_reward(None)
    ('0.250', '-')
    """
    return "-" if value is None else f"{value:.{digits}f}"


def format_seconds(seconds: float) -> str:
    """
    >>> format_seconds(0.0123)
    '12.3 ms'
    """
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def format_span(seconds: float) -> str:
    """A duration in the future, with a precision that fits a forecast.

    >>> format_span(32_400), format_span(1500), format_span(200_000)
    ('9 h', '25 min', '2 d 8 h')
    """
    minutes, hours = round(seconds / 60), round(seconds / 3600)
    if minutes < 120:
        return f"{minutes} min"
    return f"{hours} h" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def format_clock(seconds: float) -> str:
    """A duration as a clock shows it.

    >>> format_clock(65), format_clock(3725), format_clock(200_000)
    ('1:05', '1:02:05', '2 d 7:33')
    """
    whole = int(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days} d {hours}:{minutes:02d}"
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"
