"""The identity of this process in its run: loaded once at its start, used by all servers and clients.

    identity.configure(Role.INFERENCE)      # once, in __main__: reads ROLLMILL_KEYS
    identity.current()                      # None: no keys, so loopback only (``check_bind``), and plain

Renewed files are read again automatically, so keys are rotated without a restart.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from services.common.errors import ConfigError, UnauthenticatedError
from services.common.net.hosts import is_loopback
from services.common.security import bundle as files
from services.common.security.bundle import Bundle
from services.common.security.roles import Role

if TYPE_CHECKING:
    from services.common.security.certificates import Holder

log = structlog.get_logger()

LOOK_EVERY_S = 1.0  # for renewed files

Clock = Callable[[], float]


class Identity:
    """A role of a run and the keys that prove it. Safe to use from any thread."""

    def __init__(self, folder: Path, clock: Clock = time.time) -> None:
        """Raises ``ConfigError`` for files that cannot be used."""
        self.folder = folder
        self.clock = clock
        self._seen = self._stamp()
        self._bundle, holder = self._load()
        self._look_at = time.monotonic() + LOOK_EVERY_S
        self._complaint = ""  # about files that were refused
        self.generation = 0
        """Grows with every renewal that was noticed."""
        self.run = holder.run
        self.role = holder.role
        self.ends_at = holder.ends_at

    def __repr__(self) -> str:
        return f"Identity({self.role.value} of run {self.run})"

    @property
    def bundle(self) -> Bundle:
        """The keys as they are on disk, looked at no more than once in ``LOOK_EVERY_S``."""
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + LOOK_EVERY_S
            self.refresh()
        return self._bundle

    def refresh(self) -> None:
        """Read renewed files now. Unreadable keys, or keys of another role, are logged and ignored."""
        try:
            stamp = self._stamp()
            if stamp == self._seen:
                return
            fresh, holder = self._load()
            if (holder.run, holder.role) != (self.run, self.role):
                raise ConfigError(f"they are of {holder.role.value} of run {holder.run}")
        except ConfigError as error:
            if error.message != self._complaint:  # not again at every look
                self._complaint = error.message
                log.error("keys.not_renewed", folder=str(self.folder), error=error.message)
            return
        self._bundle, self._seen, self.ends_at, self._complaint = fresh, stamp, holder.ends_at, ""
        self.generation += 1
        log.info("keys.renewed", folder=str(self.folder), role=self.role.value)

    def _load(self) -> tuple[Bundle, Holder]:
        from services.common.security.certificates import holder_of, is_certificate, is_pair  # for those with keys only

        loaded = files.load(self.folder)
        try:
            holder = holder_of(loaded.certificate)
        except ConfigError as error:
            raise ConfigError(
                f"{self.folder / files.CERTIFICATE}: {error.message}; copy the whole directory of the role"
            ) from None
        if not is_pair(loaded.certificate, loaded.key):
            raise ConfigError(
                f"{self.folder / files.KEY} is not the key of {self.folder / files.CERTIFICATE}: copy the whole directory "
                "of the role, or make the keys anew"
            )
        if not is_certificate(loaded.ca):
            raise ConfigError(
                f"{self.folder / files.CA} is no certificate, or a part of one: copy the whole directory of the role"
            )
        self._check_token(loaded, holder)
        return loaded, holder

    def _check_token(self, loaded: Bundle, holder: Holder) -> None:
        """Check that the token is valid in form, of this run, and signed by the key beside it; its times are checked at
        use."""
        from services.common.security import tokens

        try:
            issued_at = tokens.read(loaded.token).issued_at
        except UnauthenticatedError:
            raise ConfigError(
                f"{self.folder / files.TOKEN} is no run token: copy the whole directory of the role"
            ) from None
        try:
            tokens.check(loaded.token, loaded.token_public, holder.run, issued_at)
        except UnauthenticatedError:
            raise ConfigError(
                f"{self.folder / files.TOKEN} does not fit {files.TOKEN_PUBLIC} and {files.CERTIFICATE} beside it: copy the "
                "whole directory of the role"
            ) from None

    def _stamp(self) -> tuple[tuple[int, int], ...]:
        try:
            stats = [(self.folder / name).stat() for name in files.FILES]
        except OSError as error:
            raise files.unusable(error.filename, error) from None
        return tuple((each.st_mtime_ns, each.st_ino) for each in stats)


_current: Identity | None = None


def configure(*roles: Role, environment: Mapping[str, str] = os.environ) -> Identity | None:
    """Load the identity that ``ROLLMILL_KEYS`` names, for the role of this process; None without keys.

    Of several roles the first one with keys is taken.

    Raises ``ConfigError`` for keys that cannot be used, or that belong to another role.
    """
    global _current
    where = environment.get(files.VARIABLE, "")
    _current = load(Path(where), *roles) if where else None
    return _current


def load(where: Path, *roles: Role) -> Identity:
    """The identity of one of these roles in a directory of keys, the first that is there. Raises ``ConfigError``."""
    found = Identity(files.find(where, roles))
    if found.role not in roles:
        names = " or ".join(role.value for role in roles)
        raise ConfigError(
            f"{files.VARIABLE} is {where}, which holds keys of role {found.role.value}, but this process is {names}: each "
            "has a directory of its own"
        )
    return found


def current() -> Identity | None:
    """The identity of this process; None without keys."""
    return _current


@contextmanager
def used(identity: Identity | None) -> Iterator[None]:
    """Use another identity in the body of this ``with``: for tests, and for tools that have several."""
    global _current
    before, _current = _current, identity
    try:
        yield
    finally:
        _current = before


def check_bind(what: str, host: str, identity: Identity | None, run_id: str = "") -> None:
    """Raises ``ConfigError`` for a bind that others reach while callers cannot be known, and for another run's keys."""
    if identity is None and not is_loopback(host):
        raise ConfigError(
            f"{what} may not bind {host} without keys, because then any caller would be accepted: make them with "
            f"`rollmill keys` and set {files.VARIABLE} to their directory, or bind loopback with host: 127.0.0.1"
        )
    if identity is not None and run_id and identity.run != run_id:
        raise ConfigError(
            f"{what}: {identity.folder} holds keys of run {identity.run!r}, but this is run {run_id!r}: make keys for it "
            f"with `rollmill keys`, and set {files.VARIABLE} to them"
        )


def check_keys_are_there(needed: bool, identity: Identity | None) -> None:
    """Raises ``ConfigError`` for a run that wants TLS (``Recipe.needs_keys``) in a process without keys."""
    if needed and identity is None:
        raise ConfigError(
            f"this run wants TLS (security.tls, or a host other than loopback), and this process has no keys: make them "
            f"with `rollmill keys` and set {files.VARIABLE} to their directory"
        )
