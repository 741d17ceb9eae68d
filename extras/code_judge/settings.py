"""Settings of the HTTP interface, a section of ``envgateway``."""

from __future__ import annotations

from services.common.config.base import HttpService, Port, Section


class HttpConfig(HttpService):
    port: Port | None = None
    """Also serve the HTTP interface that clients of Code Judge speak; they expect port 8000, 0 takes a free port.
    Variable: CODE_JUDGE_PORT."""
    reuse_port: bool = False
    """Let other gateways on this host serve the same port; the system spreads connections over them."""


class CodeJudgeSections(Section):
    http: HttpConfig = HttpConfig()
    """The HTTP interface of Code Judge."""
