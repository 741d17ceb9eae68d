"""The visitors that try the doors: callers to refuse, and the right roles, with tokens or with certificates."""

from __future__ import annotations

import ssl
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc

from services.cli.keys import CA_KEY, TOKEN_KEY, Keyring
from services.common.rpc.client import channel_options
from services.common.security import certificates, tokens
from services.common.security.certificates import Pair
from services.common.security.identity import allowed
from services.common.security.keys import CA, CERTIFICATE, KEY, Peer, Role

_DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Visitor:
    """The credentials at a door, and whether they should be accepted."""

    name: str
    is_guest: bool
    tls: bool = True
    token: str | None = None
    pair: Pair | None = None  # a client certificate

    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.token}"),) if self.token is not None else ()


class Visitors:
    """Made from the keys of this run and of a stranger's."""

    def __init__(self, keys: Keyring, folder: Path) -> None:
        self._keys = keys
        stranger = Keyring.make(folder / "stranger", "another-run")
        # Calls itself as ours does: only its keys are others.
        namesake = Keyring.make(folder / "namesake", keys.run)
        self._strangers = {role: self._shown(stranger, role) for role in Role}
        self._namesakes = {role: self._shown(namesake, role) for role in Role}
        self.ca = (keys.folder / CA).read_bytes()
        self._guests = {role: self._shown(keys, role) for role in Role}
        self._expired = {role: self._old(role) for role in Role}

    def of(self, what: str) -> Iterator[Visitor]:
        """All visitors of one door, named as in the table of permissions; guests come last."""
        right = sorted(allowed(what), key=lambda role: role.value)
        kind = "certificate" if self._keys.client_certificates else "token"
        yield Visitor(f"no {kind}", is_guest=False)
        for role in Role:
            if role not in right:
                yield self._visitor("wrong role", self._guests[role])
        for role in right:
            yield self._visitor(f"expired {kind}", self._expired[role])
            yield self._visitor(f"another run's {kind}", self._strangers[role])
            yield self._visitor(f"{kind} of a namesake", self._namesakes[role])
            yield Visitor("plain text", is_guest=False, tls=False, token=self._guests[role][0])
            if self._keys.client_certificates:
                yield Visitor("token instead of certificate", is_guest=False, token=self._guests[role][0])
            else:
                yield Visitor("forged token", is_guest=False, token=f"x.{self._guests[role][0]}"[:200])
        for role in right:
            token, pair = self._guests[role]
            yield Visitor(role.value, True, token=token, pair=pair if self._keys.client_certificates else None)

    def token(self, role: Role) -> str:
        """One more token of this run."""
        return self._keys.token(role, 1.0)

    def channel(self, address: str, visitor: Visitor) -> grpc.aio.Channel:
        alone = ("grpc.use_local_subchannel_pool", 1)  # connections are not shared with other visitors
        if not visitor.tls:
            return grpc.aio.insecure_channel(address, options=[alone])
        pair = visitor.pair
        shown = grpc.ssl_channel_credentials(self.ca, pair and pair.key, pair and pair.certificate)
        return grpc.aio.secure_channel(address, shown, options=[alone, *channel_options(Peer.MEMBER)])

    def context(self, visitor: Visitor) -> ssl.SSLContext | None:
        """The same for HTTP; None is plain text."""
        if not visitor.tls:
            return None
        context = ssl.create_default_context(cadata=self.ca.decode())
        if visitor.pair is not None:
            with tempfile.NamedTemporaryFile() as file:  # ssl reads keys from files only
                file.write(visitor.pair.key + visitor.pair.certificate)
                file.flush()
                context.load_cert_chain(file.name)
        return context

    def _visitor(self, name: str, shown: tuple[str, Pair]) -> Visitor:
        token, pair = shown
        with_certificate = self._keys.client_certificates
        return Visitor(name, False, token=None if with_certificate else token, pair=pair if with_certificate else None)

    def _shown(self, keys: Keyring, role: Role) -> tuple[str, Pair]:
        folder = next(path.parent for path in keys.folder.rglob(CERTIFICATE) if path.parent.name == role.value)
        return keys.token(role, 1.0), Pair((folder / CERTIFICATE).read_bytes(), (folder / KEY).read_bytes())

    def _old(self, role: Role) -> tuple[str, Pair]:
        """Signed by the run itself, for an hour of the day before yesterday."""
        begun = time.time() - 2 * _DAY_S
        authority = Pair(self.ca, (self._keys.folder / CA_KEY).read_bytes())
        token = tokens.mint((self._keys.folder / TOKEN_KEY).read_bytes(), self._keys.run, role, begun, 1.0)
        return token, certificates.issue(authority, self._keys.run, role, [], begun, 1 / 24)
