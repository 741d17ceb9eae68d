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

import json
import os
import stat
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.common.errors import ConfigError
from services.common.security.roles import Role

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
    if not where.is_dir():
        what = "is no directory" if where.exists() else "does not exist"
        raise ConfigError(
            f"{VARIABLE} is {where}, which {what}, so there are no keys of role {names}: name a directory that "
            "`rollmill keys` made, or its sub-directory of that role"
        )
    raise ConfigError(
        f"{VARIABLE} is {where}, but there are no keys of role {names}: name a directory that `rollmill keys` made, or "
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
