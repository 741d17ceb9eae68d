"""Run tokens: a role in one run until an expiry, signed with the run's token key (JWT, ES256).

Services hold the public key only, so none can create a token. Imports ``jwt`` (PyJWT).
"""

from __future__ import annotations

import secrets

import jwt

from services.common.errors import ConfigError, UnauthenticatedError
from services.common.security.keys import LEEWAY_S, Holder, Role

TOKEN_BYTES = 4096  # a longer one is refused unread
LONGEST_S = 10 * 366 * 86_400.0  # between a token's times; it cannot be revoked, so it must end
_LAST = 253_402_300_799  # 9999-12-31 23:59:59 UTC, the last valid time

_ISSUER = "rollmill"
_ALGORITHM = "ES256"


def mint(key: bytes, run: str, role: Role, now: float, hours: float) -> str:
    """Create a token; ``key`` is the run's private token key, PEM. Raises ``ConfigError`` for an invalid validity."""
    if not 0 <= hours * 3600 <= LONGEST_S:
        raise ConfigError(f"a token for {hours:g} hours is not taken anywhere: at most {LONGEST_S / 3600:.0f} hours")
    claims = {
        "iss": _ISSUER,
        "run": run,
        "role": role.value,
        "iat": int(now),
        "exp": int(now + hours * 3600),
        "jti": secrets.token_hex(8),
    }
    return jwt.encode(claims, key, algorithm=_ALGORITHM)


def read(token: str) -> Holder:
    """The holder of a token, without checking signature and times: for its own bearer, and for display."""
    return _holder(token, None)


def check(token: str, public_key: bytes, run: str, now: float) -> Holder:
    """The holder of a token, if valid now and of this run.

    Raises ``UnauthenticatedError``, which has no part of the token.
    """
    found = _holder(token, public_key)
    if found.run != run:
        raise UnauthenticatedError(f"the token is of another run ({found.run!r}); this is run {run!r}", why="run")
    found.check_times(now, LEEWAY_S)
    return found


def _holder(token: str, public_key: bytes | None) -> Holder:
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
        issued_at, ends_at = _whole_seconds(said["iat"]), _whole_seconds(said["exp"])
        if not 0 <= ends_at - issued_at <= LONGEST_S:
            raise ValueError("it ends before it begins, or later than any token does")
        role, name = Role(said["role"]), f"{said['role']}/{_text(said['jti'])[:16]}"
        return Holder(run=_text(said["run"]), role=role, name=name, begins_at=issued_at, ends_at=ends_at, shown="token")
    except jwt.InvalidSignatureError:
        raise UnauthenticatedError(
            "the token was signed with another run's key: take one of this run (rollmill keys token)", why="signature"
        ) from None
    except (jwt.InvalidTokenError, ValueError, TypeError, OverflowError, KeyError):
        raise UnauthenticatedError(
            "this is no run token: take the file `token` of a directory of `rollmill keys`", why="malformed"
        ) from None


def _whole_seconds(said: object) -> float:
    """Whole seconds since the epoch, as ``mint`` writes them. Infinity would never end, and true is no time."""
    if type(said) is not int or not 0 <= said <= _LAST:
        raise ValueError("a time of the token is no whole number of seconds")
    return float(said)


def _text(said: object) -> str:
    if not isinstance(said, str):
        raise ValueError("a name in the token is no text")
    return said
