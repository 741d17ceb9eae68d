"""Reads and writes a *bundle*: the key files of one role, which its processes find through ``ROLLMILL_KEYS``.

    ca.pem      the certificate of the run's authority
    cert.pem    the certificate of the role
    key.pem     its private key
    token       the same identity as a token, for clients without a certificate
    token.pub   verifies tokens of others
    bundle.json how services authenticate callers

A process needs its own bundle only. ``ROLLMILL_KEYS`` names the bundle, or a directory with a bundle under the role's
name, as ``rollmill keys`` makes them.
"""

from __future__ import annotations

import datetime
import json
import os
import stat
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Literal

from services.common.errors import ConfigError, UnauthenticatedError

# --- The roles of a run, with least privilege each, and the names of servers in certificates.


DOMAIN = "rollmill.internal"


class Role(Enum):
    """The role of the holder of a certificate or a token in a run."""

    ORCHESTRATOR = "orchestrator"
    INFERENCE = "inference"
    TRAINER = "trainer"
    PUBLISHER = "publisher"
    ENVGATEWAY = "envgateway"
    OPERATOR = "operator"
    VIEWER = "viewer"
    AGENT = "agent"
    CLIENT = "client"


SERVICES = frozenset({Role.ORCHESTRATOR, Role.INFERENCE, Role.TRAINER, Role.PUBLISHER, Role.ENVGATEWAY})
WHAT_FOR: dict[Role, str] = {
    Role.ORCHESTRATOR: "the process that issues tasks",
    Role.INFERENCE: "replicas: play tasks, fetch and relay weights",
    Role.TRAINER: "trainers: pull batches, announce versions",
    Role.PUBLISHER: "weight publishers, started by trainers",
    Role.ENVGATEWAY: "environments, judge, sandbox",
    Role.OPERATOR: "people: watch, pause, stop the run",
    Role.VIEWER: "people and dashboards that only look",
    Role.AGENT: "agent frameworks: the OpenAI-compatible endpoint only",
    Role.CLIENT: "other frameworks: judge and task server only",
}


class Peer(Enum):
    """The service that a caller wants to reach; the peer's certificate must have this name."""

    MEMBER = "member"  # any process of the run that serves
    ORCHESTRATOR = "orchestrator"
    ENVGATEWAY = "envgateway"
    WEIGHTS = "weights"  # a publisher, or a replica that relays

    @property
    def dns_name(self) -> str:
        return f"{self.value}.{DOMAIN}"


PEERS_OF: dict[Role, tuple[Peer, ...]] = {
    Role.ORCHESTRATOR: (Peer.MEMBER, Peer.ORCHESTRATOR),
    Role.INFERENCE: (Peer.MEMBER, Peer.WEIGHTS),
    Role.TRAINER: (Peer.MEMBER,),
    Role.PUBLISHER: (Peer.MEMBER, Peer.WEIGHTS),
    Role.ENVGATEWAY: (Peer.MEMBER, Peer.ENVGATEWAY),
}
"""Names for which the certificate of each role is valid. Roles without a server are absent."""


VARIABLE = "ROLLMILL_KEYS"
CA = "ca.pem"
CERTIFICATE = "cert.pem"
KEY = "key.pem"
TOKEN = "token"
TOKEN_PUBLIC = "token.pub"
SETTINGS = "bundle.json"
DAYS = 30.0  # that certificates and tokens last, if nothing else is asked for
SECRETS = frozenset({KEY, TOKEN})
FILES = (CA, CERTIFICATE, KEY, TOKEN, TOKEN_PUBLIC, SETTINGS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """The contents of the files."""

    ca: bytes
    certificate: bytes
    key: bytes
    token: str
    token_public: bytes
    client_certificates: bool
    """Whether gRPC callers must show a certificate in the handshake; otherwise each call has a token."""

    def __repr__(self) -> str:
        return "Bundle(...)"  # it holds secrets, and records end up in logs


def find(where: Path, roles: Sequence[Role]) -> Path:
    """The bundle of the first of these roles that is there: a sub-directory of its name, or ``where`` itself.

    Raises ``ConfigError``.
    """
    for folder in (*(where / role.value for role in roles), where):
        if is_there(folder / CERTIFICATE):
            return folder
    names = " or ".join(role.value for role in roles)
    what = "" if where.is_dir() else ", which is no directory" if where.exists() else ", which does not exist"
    raise ConfigError(
        f"{VARIABLE} is {where}{what}, but there are no keys of role {names}: name a directory that `rollmill keys` made, or "
        "its sub-directory of that role"
    )


def is_there(path: Path) -> bool:
    """Whether a file or directory of keys is there. Raises ``ConfigError`` where this user may not look."""
    try:
        path.stat()
    except PermissionError as error:
        raise unusable(path, error) from None
    except OSError:
        return False
    return True


def unusable(path: Path | str, error: OSError) -> ConfigError:
    """The remedy for a key file that cannot be read. In a container the user often differs from the owner of the keys."""
    if isinstance(error, PermissionError):
        user = os.geteuid()
        return ConfigError(
            f"{path}: user {user} may not read it, because keys are for their owner alone: give this user a copy of the "
            f"role's directory (chown -R {user}), or start this process as their owner"
        )
    return ConfigError(f"{path}: {error.strerror}; copy the whole directory of the role")


def load(folder: Path) -> Bundle:
    """Read a bundle. Raises ``ConfigError`` for missing files, and for secrets that are readable by all users."""
    read = {name: _read(folder / name) for name in FILES}
    try:
        settings = json.loads(read[SETTINGS])
        required = bool(settings["client_certificates"])
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{folder / SETTINGS} is not as `rollmill keys` writes it: make the keys anew") from None
    return Bundle(
        ca=read[CA],
        certificate=read[CERTIFICATE],
        key=read[KEY],
        token=read[TOKEN].decode("ascii", errors="replace").strip(),
        token_public=read[TOKEN_PUBLIC],
        client_certificates=required,
    )


def save(folder: Path, bundle: Bundle) -> None:
    """Write a bundle, each file atomically: a concurrent reader finds the old one or the new one."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)
    settings = json.dumps({"client_certificates": bundle.client_certificates}) + "\n"
    # The certificate last: running processes watch it to notice a renewal.
    write_file(folder / CA, bundle.ca)
    write_file(folder / TOKEN_PUBLIC, bundle.token_public)
    write_file(folder / SETTINGS, settings.encode())
    write_file(folder / TOKEN, bundle.token.encode() + b"\n")
    write_file(folder / KEY, bundle.key)
    write_file(folder / CERTIFICATE, bundle.certificate)


def write_file(path: Path, data: bytes) -> None:
    """Replace a file, readable by its owner only from its first moment on."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            if path.name in SECRETS and os.fstat(file.fileno()).st_mode & (stat.S_IROTH | stat.S_IWOTH):
                raise ConfigError(f"{path} is a secret that every user of this machine may read: chmod 600 {path}")
            return file.read()
    except OSError as error:
        raise unusable(path, error) from None


def without_keys(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment for programs that are none of the run's own."""
    return {name: value for name, value in environment.items() if name != VARIABLE}


# --- The holder of a certificate or token.


LEEWAY_S = 60.0  # by which clocks of two machines may differ


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """What a certificate or token says. Times are seconds since the epoch."""

    run: str
    role: Role
    name: str
    """Tells holders apart in logs and limits: names the token or the certificate, and is no secret."""
    begins_at: float
    ends_at: float
    shown: Literal["token", "certificate"]

    def check_times(self, now: float, leeway_s: float = 0.0, where: str = "") -> None:
        """Raise ``UnauthenticatedError`` with the validity period, the local time, which reveals two differing clocks, and the
        remedy."""
        what = f"the {self.shown}{where} of role {self.role.value}"
        if now > self.ends_at + leeway_s:
            raise UnauthenticatedError(
                f"{what} expired at {moment(self.ends_at)} (the clock here says {moment(now)}): make new "
                "keys with `rollmill keys ... --renew` and copy them to where the process of this role finds its own",
                why="expired",
                clock=f"{now:.0f}",
            )
        if now < self.begins_at - leeway_s:
            raise UnauthenticatedError(
                f"{what} is valid only from {moment(self.begins_at)}, and the clock here says {moment(now)}, "
                f"{self.begins_at - now:.0f} s before: set the clocks of the two machines right",
                why="not_yet_valid",
                clock=f"{now:.0f}",
            )


def moment(seconds: float) -> str:
    """For people: UTC, to the second."""
    try:
        return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return "a time out of range"
