"""Identifies callers by certificate or token."""

from __future__ import annotations

import hashlib

from services.common.errors import ConfigError, PermissionDeniedError, UnauthenticatedError
from services.common.security import certificates, tokens
from services.common.security.identity import Caller, Identity
from services.common.security.keys import LEEWAY_S, check_times

_CACHED = 256  # tokens and certificates that were found good; signatures are not checked again for each call
_BEARER = "bearer "

_NOTHING_SHOWN = (
    "neither a certificate nor a token came with the call: set ROLLMILL_KEYS to the keys of your role, or send the header "
    "`authorization: Bearer TOKEN` (rollmill keys)"
)


class Gatekeeper:
    """Checks callers against one identity: only its run's are let in."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._known: dict[str | bytes, Caller] = {}  # by the header as it came, or the digest of a certificate
        self._generation = identity.generation

    def by_token(self, authorization: str) -> Caller:
        """The caller of a header ``Bearer TOKEN``. Raises ``UnauthenticatedError``.

        Limits the speed of small calls, so a header that was seen before costs a lookup and a look at the clock.
        """
        found = self._known_as(authorization) or self._keep(authorization, self._holder_of(authorization))
        check_times("the token", found.role, found.begins_at, found.ends_at, self._identity.clock(), leeway_s=LEEWAY_S)
        return found

    def _holder_of(self, authorization: str) -> Caller:
        if authorization[: len(_BEARER)].lower() != _BEARER:
            raise UnauthenticatedError(
                "the header `authorization` is not of the form `Bearer TOKEN`: send the token of your role",
                why="malformed",
            )
        token = authorization[len(_BEARER) :].strip()
        claims = tokens.check(token, self._identity.bundle.token_public, self._identity.run, self._identity.clock())
        return Caller(
            role=claims.role,
            name=f"{claims.role.value}/{claims.token_id[:16]}",
            begins_at=claims.issued_at,
            ends_at=claims.ends_at,
            shown="token",
        )

    def by_certificate(self, certificate: bytes) -> Caller:
        """The holder of a certificate (PEM or DER); the handshake has verified its chain. Raises
        ``UnauthenticatedError``."""
        digest = hashlib.sha256(certificate).digest()
        found = self._known_as(digest)
        if found is None:
            try:
                holder = certificates.holder_of(certificate)
            except ConfigError as error:
                raise UnauthenticatedError(error.message, why="malformed") from None
            if holder.run != self._identity.run:
                raise UnauthenticatedError(
                    f"the certificate is of another run ({holder.run!r}); this is run {self._identity.run!r}", why="run"
                )
            found = self._keep(
                digest,
                Caller(
                    role=holder.role,
                    name=f"{holder.role.value}/{digest.hex()[:16]}",
                    begins_at=holder.begins_at,
                    ends_at=holder.ends_at,
                    shown="certificate",
                ),
            )
        # A connection may outlive the certificate that it was made with.
        check_times(
            "the certificate", found.role, found.begins_at, found.ends_at, self._identity.clock(), leeway_s=LEEWAY_S
        )
        return found

    def identify(self, authorization: str | None, certificate: bytes | None) -> Caller:
        """The caller, from its credentials. A certificate and a token of different roles are refused.

        Raises ``UnauthenticatedError`` or ``PermissionDeniedError``.
        """
        if certificate is not None:
            found = self.by_certificate(certificate)
            if authorization is not None and self.by_token(authorization).role is not found.role:
                raise PermissionDeniedError(
                    f"a certificate of role {found.role.value} came with a token of another role: send one of them"
                )
            return found
        if authorization is None:
            raise UnauthenticatedError(_NOTHING_SHOWN, why="missing")
        return self.by_token(authorization)

    def _known_as(self, key: str | bytes) -> Caller | None:
        if self._generation != self._identity.generation:  # perhaps another key to check with
            self._generation = self._identity.generation
            self._known.clear()
        return self._known.get(key)

    def _keep(self, key: str | bytes, found: Caller) -> Caller:
        if len(self._known) >= _CACHED:
            self._known.clear()
        self._known[key] = found
        return found
