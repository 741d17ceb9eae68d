"""Checks the validity period of a certificate or token, with messages that reveal two differing clocks."""

from __future__ import annotations

import datetime

from services.common.errors import UnauthenticatedError
from services.common.security.roles import Role

LEEWAY_S = 60.0  # by which clocks of two machines may differ


def check_times(what: str, role: Role, begins_at: float, ends_at: float, now: float, *, leeway_s: float) -> None:
    """Raise ``UnauthenticatedError`` with the validity period, the local time, and the remedy."""
    if now > ends_at + leeway_s:
        raise UnauthenticatedError(
            f"{what} of role {role.value} expired at {moment(ends_at)} (the clock here says {moment(now)}): make new "
            "keys with `rollmill keys ... --renew` and copy them to where this process finds its own",
            why="expired",
            clock=f"{now:.0f}",
        )
    if now < begins_at - leeway_s:
        raise UnauthenticatedError(
            f"{what} of role {role.value} is valid only from {moment(begins_at)}, and the clock here says {moment(now)}, "
            f"{begins_at - now:.0f} s before: set the clocks of the two machines right",
            why="not_yet_valid",
            clock=f"{now:.0f}",
        )


def moment(seconds: float) -> str:
    """For people: UTC, to the second."""
    try:
        return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return "a time out of range"
