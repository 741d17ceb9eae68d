"""A run's keys on disk: its authority, and one bundle for every role, to be copied to where the role's processes run.

    ca.pem, ca.key          the authority
    token.key, token.pub    signs and checks tokens
    keyring.json            the run, hosts, how callers are taken in
    orchestrator/ ...       bundles (``services.common.security.bundle``)
    trainer/publisher/      inside the trainer's, which starts the publisher
    inference/agent/        inside the replica's, which starts agents

``ca.key`` and ``token.key`` make identities: they stay where they were made.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.common.errors import ConfigError, UnauthenticatedError
from services.common.security import bundle as files
from services.common.security import certificates, tokens
from services.common.security.bundle import DAYS, Bundle
from services.common.security.certificates import Pair
from services.common.security.roles import Role

CA_KEY = "ca.key"
TOKEN_KEY = "token.key"
ABOUT = "keyring.json"


Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One bundle, for people; without secrets. Times are seconds since the epoch."""

    folder: Path
    role: Role
    run: str
    certificate_ends_at: float
    token_ends_at: float


class Keyring:
    """``make`` or ``open`` one; then ``renew``, ``token``, ``entries``."""

    def __init__(self, folder: Path, clock: Clock = time.time) -> None:
        """Raises ``ConfigError`` for a directory that `rollmill keys` did not make."""
        self.folder = folder
        self._clock = clock
        try:
            about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
            self.run = str(about["run"])
            self.hosts = [str(host) for host in about["hosts"]]
            self.client_certificates = bool(about["client_certificates"])
        except (OSError, ValueError, KeyError, TypeError):
            raise ConfigError(
                f"{folder} holds no keys of a run: make them with `rollmill keys RECIPE -o {folder}`"
            ) from None

    @classmethod
    def make(
        cls,
        folder: Path,
        run: str,
        *,
        hosts: Sequence[str] = (),
        days: float = DAYS,
        client_certificates: bool = False,
        clock: Clock = time.time,
    ) -> Keyring:
        """New keys of a run. Raises ``ConfigError`` when there are some already: no key is ever overwritten."""
        if (folder / ABOUT).exists() or (folder / CA_KEY).exists():
            raise ConfigError(
                f"{folder} already holds keys: renew them with --renew, or name another directory with --output"
            )
        authority = certificates.make_authority(run, clock())
        # Hosts and days that cannot be are refused here, before anything is written.
        certificates.issue(authority, run, Role.ORCHESTRATOR, hosts, clock(), days)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.chmod(0o700)
        token_key = certificates.make_key()
        files.write_file(folder / files.CA, authority.certificate)
        files.write_file(folder / CA_KEY, authority.key)
        files.write_file(folder / TOKEN_KEY, token_key)
        files.write_file(folder / files.TOKEN_PUBLIC, certificates.public_part(token_key))
        about = {"run": run, "hosts": list(hosts), "client_certificates": client_certificates}
        files.write_file(folder / ABOUT, (json.dumps(about, indent=2) + "\n").encode())
        made = cls(folder, clock)
        made.renew(days=days)
        return made

    def renew(self, *, hosts: Sequence[str] = (), days: float = DAYS) -> None:
        """New certificates and tokens of every role, from the same authority; ``hosts`` come beside the old ones.

        Processes that see the files take them up by themselves.
        """
        more = [host for host in hosts if host not in self.hosts]
        if more:
            self.hosts += more
            about = {"run": self.run, "hosts": self.hosts, "client_certificates": self.client_certificates}
            files.write_file(self.folder / ABOUT, (json.dumps(about, indent=2) + "\n").encode())
        authority = Pair(self._read(files.CA), self._read(CA_KEY))
        token_key = self._read(TOKEN_KEY)
        now = self._clock()
        for role, folder in self._folders():
            pair = certificates.issue(authority, self.run, role, self.hosts, now, days)
            made = Bundle(
                ca=authority.certificate,
                certificate=pair.certificate,
                key=pair.key,
                token=tokens.mint(token_key, self.run, role, now, days * 24),
                token_public=certificates.public_part(token_key),
                client_certificates=self.client_certificates,
            )
            files.save(folder, made)

    def token(self, role: Role, hours: float) -> str:
        """One more token of a role."""
        return tokens.mint(self._read(TOKEN_KEY), self.run, role, self._clock(), hours)

    def entries(self) -> list[Entry]:
        """Every bundle that is there."""
        return self.entries_below(self.folder)

    @staticmethod
    def entries_below(folder: Path) -> list[Entry]:
        """Every bundle in a directory or its subfolders, such as a copy on another node."""
        found = []
        for certificate in sorted(folder.rglob(files.CERTIFICATE)):
            held = files.load(certificate.parent)
            try:
                holder, claims = certificates.holder_of(held.certificate), tokens.read(held.token)
            except (ConfigError, UnauthenticatedError) as error:
                raise ConfigError(
                    f"{certificate.parent}: {error.message}; copy the whole directory again, or make the keys anew"
                ) from None
            found.append(
                Entry(
                    folder=certificate.parent,
                    role=holder.role,
                    run=holder.run,
                    certificate_ends_at=holder.ends_at,
                    token_ends_at=claims.ends_at,
                )
            )
        return found

    def _folders(self) -> Iterator[tuple[Role, Path]]:
        for role in Role:
            if role is not Role.PUBLISHER:
                yield role, self.folder / role.value
        # The keys that a process hands to its children are in its own directory.
        yield Role.PUBLISHER, self.folder / Role.TRAINER.value / Role.PUBLISHER.value
        yield Role.AGENT, self.folder / Role.INFERENCE.value / Role.AGENT.value

    def _read(self, name: str) -> bytes:
        try:
            return (self.folder / name).read_bytes()
        except OSError as error:
            raise ConfigError(
                f"{self.folder / name}: {error.strerror}; only the directory that `rollmill keys` made can make keys, "
                "not the bundles copied from it"
            ) from None
