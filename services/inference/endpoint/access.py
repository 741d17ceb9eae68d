"""Creates the URL and session text of an agent, and reads the session from its requests.

Without keys: ``http``, and the session. With keys: ``https``, and ``TOKEN~SESSION`` in place of the session: as the API
key (``Authorization: Bearer``, or ``X-Api-Key``), or in the header ``X-Rollmill-Session`` or ``X-Session-ID``. So any client
that takes a base URL and an API key can be an agent, on loopback or remote.
"""

from __future__ import annotations

import atexit
import os
import ssl
import tempfile
from ipaddress import ip_address
from pathlib import Path

from aiohttp import web

from services.common.errors import ConfigError
from services.common.net import hosts
from services.common.security import identity
from services.common.security.identity import Identity
from services.common.security.roles import Role

SESSION_HEADER = "X-Rollmill-Session"
SESSION_HEADERS = (SESSION_HEADER, "X-Session-ID")
KEY_HEADERS = ("X-Api-Key", "Authorization")
CA_VARIABLE = "SSL_CERT_FILE"  # trusted authorities; read by OpenSSL and httpx, and so by the client `openai`

_BETWEEN = "~"  # a character that no token and no session has
_BEARER = "Bearer "


def shown_sessions(request: web.Request) -> tuple[list[str], list[str]]:
    """The sessions that a request names in headers for sessions, and in those for API keys."""
    in_headers, in_keys = (
        [_plain(given).rpartition(_BETWEEN)[2] for name in names if (given := request.headers.get(name)) is not None]
        for names in (SESSION_HEADERS, KEY_HEADERS)
    )
    return in_headers, in_keys


def shown_token(request: web.Request) -> str | None:
    """The token that a request brings, with the session or by itself, as a header ``Bearer TOKEN``."""
    for name in (*SESSION_HEADERS, *KEY_HEADERS):
        token, between, _ = _plain(request.headers.get(name, "")).rpartition(_BETWEEN)
        if between:
            return _BEARER + token
    return request.headers.get("Authorization")


def _plain(header: str) -> str:
    return header.removeprefix(_BEARER).strip()


def agent_of(who: Identity) -> Identity:
    """The agents' identity: the inference service's bundle holds theirs. Raises ``ConfigError`` if the bundle lacks the identity."""
    return identity.load(who.folder, Role.AGENT)


def with_token(session: str, agent: Identity) -> str:
    """The session text with an agent's token."""
    return agent.bundle.token + _BETWEEN + session


def base_url(host: str, port: int, *, secure: bool) -> str:
    """The endpoint's URL for agents on this machine."""
    host = host.strip("[]")
    try:
        if ip_address(host).is_unspecified:  # a wildcard bind includes loopback
            host = "::1" if ":" in host else "127.0.0.1"
    except ValueError:
        pass  # a name
    return f"{'https' if secure else 'http'}://{hosts.address(host, port)}/v1"


def trust(who: Identity) -> None:
    """Add the run's authority to the trusted authorities of this process and its child processes."""
    trusted = os.environ.get(CA_VARIABLE) or ssl.get_default_verify_paths().cafile
    try:
        others = Path(trusted).read_bytes() if trusted else b""
    except OSError as error:
        raise ConfigError(f"{CA_VARIABLE} is {trusted}: {error.strerror}") from None
    if who.bundle.ca in others:
        return
    with tempfile.NamedTemporaryFile(prefix="rollmill-trust-", suffix=".pem", delete=False) as file:
        file.write(others.rstrip() + b"\n" + who.bundle.ca)
    atexit.register(Path(file.name).unlink, missing_ok=True)
    os.environ[CA_VARIABLE] = file.name
