"""What an agent is given to reach the endpoint, and how that is found again in its requests.

Without keys: ``http``, and the session. With keys: ``https``, and ``TOKEN~SESSION``, which stands wherever the session
would: as the API key, or in the header ``X-Millrace-Session``. So any client that takes a base URL and an API key can be an
agent, on loopback and off it.
"""

from __future__ import annotations

import atexit
import os
import ssl
import tempfile
from ipaddress import ip_address
from pathlib import Path

from aiohttp import web

from services.common import hosts
from services.common.errors import ConfigError
from services.common.security import identity
from services.common.security.identity import Identity
from services.common.security.roles import Role

SESSION_HEADER = "X-Millrace-Session"
CA_VARIABLE = "SSL_CERT_FILE"  # whom programs trust; heeded by OpenSSL and httpx, and so by the client `openai`

_BETWEEN = "~"  # neither tokens nor sessions have it
_BEARER = "Bearer "


def shown_session(request: web.Request) -> str:
    """The session that a request names; empty when it names none."""
    given = request.headers.get(SESSION_HEADER)
    if given is None:
        given = request.headers.get("Authorization", "").removeprefix(_BEARER).strip()
    return given.rpartition(_BETWEEN)[2]


def shown_token(request: web.Request) -> str | None:
    """The token that a request brings, with the session or by itself, as a header ``Bearer TOKEN``."""
    for given in (request.headers.get(SESSION_HEADER, ""), request.headers.get("Authorization", "")):
        token, between, _ = given.removeprefix(_BEARER).strip().rpartition(_BETWEEN)
        if between:
            return _BEARER + token
    return request.headers.get("Authorization")


def agent_of(who: Identity) -> Identity:
    """The agents' identity: the inference service's bundle holds theirs. Raises ``ConfigError`` when it does not."""
    return identity.load(who.folder, Role.AGENT)


def with_token(session: str, agent: Identity) -> str:
    """What an agent gets instead of the bare session."""
    return agent.bundle.token + _BETWEEN + session


def base_url(host: str, port: int, *, secure: bool) -> str:
    """Where agents on this machine find the endpoint."""
    host = host.strip("[]")
    try:
        if ip_address(host).is_unspecified:  # listens everywhere: here too
            host = "::1" if ":" in host else "127.0.0.1"
    except ValueError:
        pass  # a name
    return f"{'https' if secure else 'http'}://{hosts.address(host, port)}/v1"


def trust(who: Identity) -> None:
    """Agents of this process, and programs that it starts, trust the run's authority beside those they trust already."""
    trusted = os.environ.get(CA_VARIABLE) or ssl.get_default_verify_paths().cafile
    try:
        others = Path(trusted).read_bytes() if trusted else b""
    except OSError as error:
        raise ConfigError(f"{CA_VARIABLE} is {trusted}: {error.strerror}") from None
    if who.bundle.ca in others:
        return
    with tempfile.NamedTemporaryFile(prefix="millrace-trust-", suffix=".pem", delete=False) as file:
        file.write(others.rstrip() + b"\n" + who.bundle.ca)
    atexit.register(Path(file.name).unlink, missing_ok=True)
    os.environ[CA_VARIABLE] = file.name
