"""The caller of the request that is being served. No heavy imports: limits and logs use this module in processes
without keys."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

from services.common.security.roles import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The role of a caller, and its time of expiry."""

    role: Role
    name: str
    """Tells callers apart in logs and limits: names the token or the certificate, and is no secret."""
    begins_at: float
    ends_at: float
    shown: str  # "token" or "certificate"


caller: ContextVar[Caller | None] = ContextVar("caller", default=None)
"""Of the call that is being served; None in a process without keys."""
