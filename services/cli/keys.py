"""Keys of a run: made, kept, renewed, and handed to its processes.

    ca.pem, ca.key          the authority
    token.key, token.pub    signs and checks tokens
    keyring.json            the run, hosts, how callers are taken in
    orchestrator/ ...       bundles (``services.common.security.keys``)
    trainer/publisher/      inside the trainer's, which starts the publisher
    inference/agent/        inside the replica's, which starts agents

``ca.key`` and ``token.key`` make identities: they stay where they were made. Everything else is copied to where the role's
processes run. `cryptography` is imported where keys are made or read: a run without keys needs none.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from services.cli.console import say
from services.cli.plan import BUNDLES, HOST_VARIABLE, ProcessSpec, other_nodes, plan
from services.common.config.loading import save_resolved
from services.common.config.recipe import Recipe, warm_start_dir
from services.common.errors import ConfigError, DeadlineError, UnauthenticatedError
from services.common.security import keys as files
from services.common.security.identity import Identity, configure
from services.common.security.keys import CA, DAYS, VARIABLE, Bundle, Role, is_there

KEYS = "keys"  # in the run directory
RENEWED_WITHIN_S = 14 * 86400.0

_WITH_KEYS = ("orchestrator", "envgateway", "inference", "trainer")  # what names of processes begin with, and roles


def keys_there(recipe: Recipe, run_dir: Path, environment: Mapping[str, str] = os.environ) -> Path | None:
    """The directory of the run's keys: its own, else those that ROLLMILL_KEYS names; None where there are none, or TLS is off."""
    if recipe.security.tls == "off":
        return None
    folder = run_dir / KEYS
    if is_there(folder / CA):
        return folder
    given = environment.get(VARIABLE)
    return Path(given).resolve() if given else None


def keys_of(recipe: Recipe, run_dir: Path, environment: Mapping[str, str] = os.environ) -> Path | None:
    """The keys that exist, else new keys of the run; None for a run without keys. Only for commands that start
    processes: a command that calls a running run must not make new keys."""
    found = keys_there(recipe, run_dir, environment)
    if found is not None or not recipe.needs_keys:
        return found
    _make_once(recipe, run_dir / KEYS)
    return run_dir / KEYS


def _make_once(recipe: Recipe, folder: Path) -> None:
    """Whole or not at all: processes of a split launch may come at once, and the keys of the first one count."""

    hosts = [socket.gethostname(), *recipe.hosts.values()]
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))  # mode 700
    try:
        Keyring.make(
            partial,
            str(recipe.run.id),
            hosts=[host for host in dict.fromkeys(hosts) if host not in ("0.0.0.0", "::", "")],
            client_certificates=recipe.security.client_certificates,
        )
        partial.rename(folder)
    except OSError:
        if not (folder / CA).exists():
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # nothing is there when it was renamed


def renew_in_time(keys: Path | None) -> bool:
    """New certificates and tokens for a run that goes on, when its own would not last ``RENEWED_WITHIN_S`` any more;
    whether there are some now.

    Keys that were copied here can only be renewed where they were made.
    """
    if keys is None or not is_there(keys / CA_KEY):
        return False
    if min(each.ends_at for each in entries(keys)) > time.time() + RENEWED_WITHIN_S:
        return False
    Keyring(keys).renew()
    return True


def with_keys(spec: ProcessSpec, keys: Path | None) -> ProcessSpec:
    """The process with the keys of its role and no others."""
    kind = spec.name.partition("-")[0]
    variables = {VARIABLE: ""}
    if keys is not None and kind in _WITH_KEYS:
        own = keys / kind
        # grpc logs every unfinished handshake; an unauthenticated client could fill the disk with that.
        quiet = os.environ.get("GRPC_VERBOSITY", "ERROR")
        variables = {VARIABLE: str(own if is_there(own) else keys), "GRPC_VERBOSITY": quiet}
    return dataclasses.replace(spec, env={**spec.env, **variables})


def role_of(process: str) -> Role:
    """The role of a process by its name in the plan."""
    return Role(process.partition("-")[0])


def act_as(keys: Path | None, process: str) -> Identity | None:
    """Gives this command the role of one of the run's processes, which it is about to start."""
    return configure(role_of(process), environment={VARIABLE: str(keys or "")})


def operate(keys: Path | None) -> Identity | None:
    """This command acts as an operator of the run, or as a viewer where only such keys are there."""
    return configure(Role.OPERATOR, Role.VIEWER, environment={VARIABLE: str(keys or "")})


def check_dates(identity: Identity | None) -> None:
    """Raise ``UnauthenticatedError``, with the remedy, for keys that are expired or not valid yet by the local clock."""
    if identity is None:
        return
    from services.common.security.certificates import holder_of

    holder_of(identity.bundle.certificate).check_times(identity.clock(), where=f" in {identity.folder}")


KEYS_WAIT_S = 3600.0
_POLL_S = 0.2


def write_bundles(recipe: Recipe, run_dir: Path, keys: Path) -> None:
    """Write, or renew, the bundle of every other node (RUN/nodes/N): the resolved recipe, starting checkpoints and the keys
    of its processes' roles, with neither the authority nor an operator. Writes none if only the keys of some roles are here: then the
    owner of the authority distributes them. Raises ``ConfigError`` for keys that cannot be used."""
    for node in other_nodes(recipe):
        roles = {role_of(spec.name) for spec in plan(recipe, run_dir, node)}
        if all(files.is_there(keys / role.value) for role in roles):
            _write(recipe, run_dir, keys, roles, run_dir / BUNDLES / str(node))


def keys_of_process(
    recipe: Recipe,
    process: str,
    node: int,
    run_dir: Path,
    console: Console,
    environment: Mapping[str, str] = os.environ,
) -> Path | None:
    """The keys of one process that is started alone: those that ROLLMILL_KEYS names, else those of the run, after
    waiting until the orchestrator has made them. None for a run without keys.

    Raises:
        ConfigError: the process needs keys that only node 0 has.
        DeadlineError: the orchestrator has not made them in time.
    """
    if recipe.security.tls == "off":
        return None
    if named := environment.get(VARIABLE, ""):
        return Path(named).resolve()
    folder = run_dir / KEYS
    if files.is_there(folder):
        return folder
    if not other_nodes(recipe) and not recipe.needs_keys:
        return None
    if node != 0:
        raise ConfigError(
            f"{process} runs on node {node} and needs the keys of the run: copy its bundle from node 0 and set {VARIABLE} to "
            "the keys in it (`rollmill run`, or the start of the orchestrator, prints both commands)"
        )
    say(console, f"waiting for the orchestrator to make the keys in {folder}")
    deadline = time.monotonic() + KEYS_WAIT_S
    while not files.is_there(folder):
        if time.monotonic() > deadline:
            raise DeadlineError(
                f"the keys of the run were not made in {folder} within {KEYS_WAIT_S:g} s: start the orchestrator with the same "
                f"RUN_DIR; on a machine that does not see it, set {HOST_VARIABLE} and {VARIABLE}"
            )
        time.sleep(_POLL_S)
    return folder


def _write(recipe: Recipe, run_dir: Path, keys: Path, roles: Collection[Role], bundle: Path) -> None:
    """Write the keys of that node's processes (inference services, shares of trainers), the settings, and the starting
    checkpoints."""
    for folder in (bundle.parent, bundle):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    save_resolved(recipe, bundle)
    for role in roles:
        source, target = files.find(keys, [role]), bundle / KEYS / role.value
        files.save(target, files.load(source))
        if role is Role.INFERENCE and (source / Role.AGENT.value).is_dir():  # for the agents that a replica starts
            files.save(target / Role.AGENT.value, files.load(source / Role.AGENT.value))
    for policy in recipe.warm_start:
        link = warm_start_dir(bundle, policy)
        if not link.is_symlink():
            link.parent.mkdir(exist_ok=True)
            # Filled by the time it is copied. Relative: the copying host may mount the run under another path.
            link.symlink_to(os.path.relpath(warm_start_dir(run_dir, policy), link.parent))


CA_KEY = "ca.key"
TOKEN_KEY = "token.key"
ABOUT = "keyring.json"


Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Entry:
    """One bundle, for people; without secrets. Times are seconds since the epoch."""

    folder: Path
    role: Role
    run: str
    ends_at: float  # the earlier end of certificate and token


class Keyring:
    """``make`` or ``open`` one; then ``renew``, ``token``."""

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
        from services.common.security import certificates

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
        _write_about(folder, run, list(hosts), client_certificates)
        made = cls(folder, clock)
        made.renew(days=days)
        return made

    def renew(self, *, hosts: Sequence[str] = (), days: float = DAYS) -> None:
        """New certificates and tokens of every role, from the same authority; ``hosts`` come beside the old ones.

        Processes that see the files take them up by themselves.
        """
        from services.common.security import certificates, tokens

        more = [host for host in hosts if host not in self.hosts]
        if more:
            self.hosts += more
            _write_about(self.folder, self.run, self.hosts, self.client_certificates)
        authority = certificates.Pair(self._read(files.CA), self._read(CA_KEY))
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
        from services.common.security import tokens

        return tokens.mint(self._read(TOKEN_KEY), self.run, role, self._clock(), hours)

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


def entries(folder: Path) -> list[Entry]:
    """Every bundle in a directory or its subfolders: those of a keyring, or of a copy on another node."""
    from services.common.security import certificates, tokens

    found = []
    for certificate in sorted(folder.rglob(files.CERTIFICATE)):
        held = files.load(certificate.parent)
        try:
            holder, claims = certificates.holder_of(held.certificate), tokens.read(held.token)
        except (ConfigError, UnauthenticatedError) as error:
            raise ConfigError(
                f"{certificate.parent}: {error.message}; copy the whole directory again, or make the keys anew"
            ) from None
        found.append(Entry(certificate.parent, holder.role, holder.run, min(holder.ends_at, claims.ends_at)))
    return found


def _write_about(folder: Path, run: str, hosts: list[str], client_certificates: bool) -> None:
    about = {"run": run, "hosts": hosts, "client_certificates": client_certificates}
    files.write_file(folder / ABOUT, (json.dumps(about, indent=2) + "\n").encode())
