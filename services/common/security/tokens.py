"""Run tokens: a role in one run until a moment, signed with the run's token key (JWT, ES256).

Who checks a token holds the public key only, so no service can make one. Imports ``jwt`` (PyJWT).
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import jwt

from services.common.errors import UnauthenticatedError
from services.common.security.roles import Role
from services.common.security.times import LEEWAY_S, check_times

TOKEN_BYTES = 4096  # a longer one is refused unread

_ISSUER = "millrace"
_ALGORITHM = "ES256"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """What a token says. Times are seconds since the epoch."""

    run: str
    role: Role
    issued_at: float
    ends_at: float
    token_id: str  # names the token in logs


def mint(key: bytes, run: str, role: Role, now: float, hours: float) -> str:
    """A new token; ``key`` is the run's private token key, PEM."""
    claims = {
        "iss": _ISSUER,
        "run": run,
        "role": role.value,
        "iat": int(now),
        "exp": int(now + hours * 3600),
        "jti": secrets.token_hex(8),
    }
    return jwt.encode(claims, key, algorithm=_ALGORITHM)


def read(token: str) -> Claims:
    """What a token says, its signature and times unchecked: for its own bearer, and for people."""
    return _claims(token, None)


def check(token: str, public_key: bytes, run: str, now: float) -> Claims:
    """What a token says, when it is this run's and its time is now.

    Raises ``UnauthenticatedError`` without any part of the token in it.
    """
    claims = _claims(token, public_key)
    if claims.run != run:
        raise UnauthenticatedError(f"the token is of another run ({claims.run!r}); this is run {run!r}", why="run")
    check_times("the token", claims.role, claims.issued_at, claims.ends_at, now, leeway_s=LEEWAY_S)
    return claims


def _claims(token: str, public_key: bytes | None) -> Claims:
    if len(token) > TOKEN_BYTES:
        raise UnauthenticatedError("this is no run token: it is too long", why="malformed")
    try:
        said = jwt.decode(
            token,
            public_key or b"",
            algorithms=[_ALGORITHM],
            issuer=_ISSUER,
            options={
                "verify_signature": public_key is not None,
                "require": ["iss", "run", "role", "iat", "exp", "jti"],
                # Against an injected clock, with a message that names both clocks.
                "verify_exp": False,
                "verify_iat": False,
                "verify_nbf": False,
            },
        )
        return Claims(
            run=str(said["run"]),
            role=Role(said["role"]),
            issued_at=float(said["iat"]),
            ends_at=float(said["exp"]),
            token_id=str(said["jti"]),
        )
    except jwt.InvalidSignatureError:
        raise UnauthenticatedError(
            "the token was signed with another run's key: take one of this run (millrace keys token)", why="signature"
        ) from None
    except (jwt.InvalidTokenError, ValueError, TypeError, OverflowError, KeyError):
        raise UnauthenticatedError(
            "this is no run token: take the file `token` of a directory of `millrace keys`", why="malformed"
        ) from None
