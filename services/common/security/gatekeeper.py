"""Identifies callers by certificate or token."""

from __future__ import annotations

from services.common.errors import ConfigError, PermissionDeniedError, UnauthenticatedError
from services.common.security import certificates, tokens
from services.common.security.identity import Identity
from services.common.security.keys import LEEWAY_S, Holder

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
        self._known: dict[str | bytes, Holder] = {}  # by the header or the certificate as it came
        self._generation = identity.generation

    def by_token(self, authorization: str) -> Holder:
        """The holder of a header ``Bearer TOKEN``. Raises ``UnauthenticatedError``.

        Limits the speed of small calls, so a header that was seen before costs a lookup and a look at the clock.
        """
        found = self._known_as(authorization)
        if found is None:
            if authorization[: len(_BEARER)].lower() != _BEARER:
                raise UnauthenticatedError(
                    "the header `authorization` is not of the form `Bearer TOKEN`: send the token of your role",
                    why="malformed",
                )
            token, who = authorization[len(_BEARER) :].strip(), self._identity
            found = self._keep(authorization, tokens.check(token, who.bundle.token_public, who.run, who.clock()))
        found.check_times(self._identity.clock(), LEEWAY_S)
        return found

    def by_certificate(self, certificate: bytes) -> Holder:
        """The holder of a certificate (PEM or DER); the handshake has verified its chain. Raises
        ``UnauthenticatedError``."""
        found = self._known_as(certificate)
        if found is None:
            try:
                found = certificates.holder_of(certificate)
            except ConfigError as error:
                raise UnauthenticatedError(error.message, why="malformed") from None
            if found.run != self._identity.run:
                raise UnauthenticatedError(
                    f"the certificate is of another run ({found.run!r}); this is run {self._identity.run!r}", why="run"
                )
            self._keep(certificate, found)
        found.check_times(self._identity.clock(), LEEWAY_S)  # a connection may outlive the certificate of its handshake
        return found

    def identify(self, authorization: str | None, certificate: bytes | None) -> Holder:
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

    def _known_as(self, key: str | bytes) -> Holder | None:
        if self._generation != self._identity.generation:  # perhaps another key to check with
            self._generation = self._identity.generation
            self._known.clear()
        return self._known.get(key)

    def _keep(self, key: str | bytes, found: Holder) -> Holder:
        if len(self._known) >= _CACHED:
            self._known.clear()
        self._known[key] = found
        return found
