"""Settings of access to a run's services."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator

from services.common.config.base import Section


class SecurityConfig(Section):
    tls: Literal["auto", "on", "off"] = "auto"
    """`auto`: TLS and keys as soon as any service binds another address than loopback, or MILLRACE_KEYS is set. `on`: also
    on loopback. `off`: never, so loopback only. `millrace run` makes the keys; for processes that are started one by one
    `millrace keys` does."""
    client_certificates: bool = False
    """Off: gRPC callers show a run token with each call. On: they show a certificate in the handshake, which
    fails without one. HTTP takes either while this is off."""

    @field_validator("tls", mode="before")
    @classmethod
    def _yaml_words(cls, value: Any) -> Any:
        """YAML reads a bare `on` or `off` as true or false."""
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else value
