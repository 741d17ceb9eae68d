"""Where a process may listen: anywhere with keys, on loopback without."""

from __future__ import annotations

from services.common.errors import ConfigError
from services.common.net.loopback import is_loopback
from services.common.security.bundle import VARIABLE
from services.common.security.identity import Identity


def check_bind(what: str, host: str, identity: Identity | None, run_id: str = "") -> None:
    """Raises ``ConfigError`` for a bind that others reach while callers cannot be known, and for another run's keys."""
    if identity is None and not is_loopback(host):
        raise ConfigError(
            f"{what} may not bind {host} without keys, because then any caller would be accepted: make them with "
            f"`millrace keys` and set {VARIABLE} to their directory, or bind loopback with host: 127.0.0.1"
        )
    if identity is not None and run_id and identity.run != run_id:
        raise ConfigError(
            f"{what}: {identity.folder} holds keys of run {identity.run!r}, but this is run {run_id!r}: make keys for it "
            f"with `millrace keys`, and set {VARIABLE} to them"
        )


def check_keys_are_there(needed: bool, identity: Identity | None) -> None:
    """Raises ``ConfigError`` for a run that wants TLS (``Recipe.needs_keys``) in a process without keys."""
    if needed and identity is None:
        raise ConfigError(
            f"this run wants TLS (security.tls, or a host other than loopback), and this process has no keys: make them "
            f"with `millrace keys` and set {VARIABLE} to their directory"
        )
