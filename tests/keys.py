"""Keys for tests: a run's, made in milliseconds, at any time of day."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from pathlib import Path

from services.cli.keys import Keyring
from services.common.security import identity
from services.common.security import keys as bundle
from services.common.security.identity import Identity
from services.common.security.keys import Role

DAY_S = 86400.0


def make_keys(folder: Path, run: str = "r1", *, age_days: float = 0.0, **settings: object) -> Keyring:
    """A run's keys as if made ``age_days`` ago; negative: in the future."""
    clock: Callable[[], float] = lambda: time.time() - age_days * DAY_S  # noqa: E731
    return Keyring.make(folder, run, clock=clock, **settings)  # type: ignore[arg-type]


def as_role(keys: Keyring, role: Role) -> Identity:
    """The identity of a process of this role."""
    where = keys.folder / "trainer" if role is Role.PUBLISHER else keys.folder
    return identity.load(where, role)


def client_context(who: Identity) -> ssl.SSLContext:
    """Trusts the run's authority alone, and shows the identity's certificate."""
    context = ssl.create_default_context(cadata=who.bundle.ca.decode())
    context.load_cert_chain(who.folder / bundle.CERTIFICATE, who.folder / bundle.KEY)
    return context
