"""The identity of this process in its run: loaded once at its start, used by all servers and clients.

    identity.configure(Role.INFERENCE)      # once, in __main__: reads ROLLMILL_KEYS
    identity.current()                      # None: no keys, so loopback only (``check_bind``), and plain

Renewed files are read again automatically, so keys are rotated without a restart.
"""

from __future__ import annotations

import os
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple

import structlog

from services.common.errors import AccessError, ConfigError, PermissionDeniedError, UnauthenticatedError
from services.common.net.hosts import host_and_port, is_loopback
from services.common.security import keys as files
from services.common.security.keys import SERVICES, Bundle, Holder, Peer, Role, moment

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
            raise self._unusable(files.CERTIFICATE, error.message) from None
        if not is_pair(loaded.certificate, loaded.key):
            raise self._unusable(files.KEY, f"it is not the key of {files.CERTIFICATE} beside it")
        if not is_certificate(loaded.ca):
            raise self._unusable(files.CA, "it is no certificate, or a part of one")
        from services.common.security import tokens

        try:  # of this run, and signed by the key beside it; its times are checked at use
            tokens.check(loaded.token, loaded.token_public, holder.run, tokens.read(loaded.token).begins_at)
        except UnauthenticatedError:
            why = f"it is no run token, or does not fit {files.TOKEN_PUBLIC} and {files.CERTIFICATE} beside it"
            raise self._unusable(files.TOKEN, why) from None
        return loaded, holder

    def _unusable(self, name: str, why: str) -> ConfigError:
        return ConfigError(f"{self.folder / name}: {why}: copy the whole directory of the role, or make the keys anew")

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


caller: ContextVar[Holder | None] = ContextVar("caller", default=None)
"""Of the call that is being served; None in a process without keys."""


# --- Finds the reason why a connection to a peer fails because of keys.


PROBE_S = 2.0  # for connecting, and again for the handshake
_CLOSED_TIMES = 3  # handshakes in a row after which a server that closes is not one that happens to be ending
_BETWEEN_S = 1.0
_FIRST_WORD_S = 0.5  # a server that refuses our certificate says so after its own handshake is done


def refusal(address: str, who: Identity | None, peer: Peer = Peer.MEMBER) -> AccessError | None:
    """The error of keys between this process and ``HOST:PORT``; None if keys are not the reason.

    Blocks for a few seconds at most.
    """
    for remaining in reversed(range(_CLOSED_TIMES)):
        try:
            with socket.create_connection(host_and_port(address), PROBE_S) as connection:
                connection.settimeout(PROBE_S)
                return _without_keys(address, connection) if who is None else _with_keys(address, connection, who, peer)
        except _ClosedError:
            if remaining:
                time.sleep(_BETWEEN_S)
        except (OSError, ValueError):
            return None  # nothing listens there: keys are not the reason
    assert who is not None
    return _refused(address, "it closed the connection", who)


class _ClosedError(Exception):
    """The server ended the connection right after a good handshake: a refusal, or its own end."""


def _without_keys(address: str, connection: socket.socket) -> AccessError | None:
    try:
        _anyone().wrap_socket(connection).close()
    except (ssl.SSLError, OSError):
        return None
    return UnauthenticatedError(
        f"{address} speaks TLS, and this process has no keys: set {files.VARIABLE} to the directory of its role "
        "(rollmill keys)",
        why="no_keys",
    )


def _with_keys(address: str, connection: socket.socket, who: Identity, peer: Peer) -> AccessError | None:
    context = _anyone()
    context.load_cert_chain(who.folder / files.CERTIFICATE, who.folder / files.KEY)
    talking = False
    try:
        with context.wrap_socket(connection) as talk:
            talking = True
            if (found := _distrusted(address, talk.getpeercert(binary_form=True) or b"", who, peer)) is not None:
                return found
            talk.settimeout(_FIRST_WORD_S)
            if not talk.recv(1) and who.bundle.client_certificates:
                raise _ClosedError
    except TimeoutError:
        return None
    except ssl.SSLError as error:
        if error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST"):
            return UnauthenticatedError(
                f"{address} speaks no TLS, and this process has keys: start that service with {files.VARIABLE} set too, or "
                "this one without",
                why="plain",
            )
        if "ALERT" in (error.reason or ""):
            return _refused(address, error.reason or "", who)
        return None
    except OSError as error:
        if talking and who.bundle.client_certificates:
            raise _ClosedError from error
        return None  # before it showed a certificate: a process that is ending, or a forwarder without a target
    return None


def _distrusted(address: str, shown: bytes, who: Identity, peer: Peer) -> AccessError | None:
    """What is wrong with the certificate (DER) of a server."""
    from services.common.security.certificates import holder_of, is_signed_by

    if not is_signed_by(shown, who.bundle.ca):
        return UnauthenticatedError(
            f"{address} has a certificate that this run's authority did not sign: it belongs to another run, or has keys of "
            f"another `rollmill keys`; this process has those in {who.folder}",
            why="run",
        )
    holder = holder_of(shown)
    try:
        holder.check_times(who.clock(), where=f" at {address}")
    except UnauthenticatedError as untimely:
        return untimely
    if peer in files.PEERS_OF.get(holder.role, ()):
        return None
    return UnauthenticatedError(
        f"{address} is {holder.role.value}, not {peer.value}: the address is wrong, or another service answers in its place",
        why="peer",
    )


def _refused(address: str, said: str, who: Identity) -> AccessError:
    now = who.clock()
    own = f"the certificate of role {who.role.value} in {who.folder}"
    if now > who.ends_at:
        return UnauthenticatedError(
            f"{own} expired at {moment(who.ends_at)}: make new keys with `rollmill keys ... --renew`", why="expired"
        )
    return UnauthenticatedError(
        f"{address} refuses {own} ({said}): is it of the same run, and are the clocks of both machines right?",
        why="run",
    )


def _anyone() -> ssl.SSLContext:
    """A context that trusts any peer: to read its certificate, never to exchange data."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2", "http/1.1"])
    return context


# --- The table of RPCs: who may call each, for how long, and with how large a request; and of groups of HTTP routes. A method
# that is not listed is denied.


SMALL_BYTES = 64 << 10  # the largest request of most methods
MOST_BYTES = 4 << 20  # the largest message; larger ones are slower to move, and larger contents are streamed


class Rpc(NamedTuple):
    roles: Iterable[Role]
    """Those that may call it."""
    deadline_s: float | None = None
    """None: a stream that a lease, a drain or the run's end closes."""
    is_retried: bool = False
    """Repeating it is harmless, so the channel waits for the peer (up to the call's deadline) and retries UNAVAILABLE. The
    others are retried by their callers, which know the work done already, or not at all."""
    request_bytes: int = SMALL_BYTES
    """Of one message of the request."""


_LOOKING = {Role.OPERATOR, Role.VIEWER}
_PLAYING = {Role.INFERENCE, Role.OPERATOR}
_JUDGED = {Role.INFERENCE, Role.CLIENT, Role.OPERATOR}
RPCS: dict[str, dict[str, Rpc]] = {
    "rollmill.v1.PoolService": {
        "JoinPool": Rpc({Role.INFERENCE}, request_bytes=1 << 20),
        "StreamReports": Rpc({Role.INFERENCE}, request_bytes=1 << 20),  # each is answered within ``REPORT_ANSWER_S``
        "StreamTrajectories": Rpc({Role.INFERENCE}, request_bytes=MOST_BYTES),
        "JoinGateway": Rpc(
            {Role.ENVGATEWAY}
        ),  # which learns from it that the run has ended, and nothing else of the run
    },
    "rollmill.v1.TrainingService": {
        "JoinTraining": Rpc({Role.TRAINER}, request_bytes=1 << 20),
        "ReportTrainer": Rpc({Role.TRAINER}, 5.0, True, 1 << 20),
        "PullBatch": Rpc({Role.TRAINER}, 60.0),  # to the first message
        "PublishVersion": Rpc({Role.TRAINER}, 10.0, True, 1 << 20),
    },
    "rollmill.v1.WeightService": {
        "GetManifest": Rpc({Role.INFERENCE}, 10.0, True),
        "FetchWeights": Rpc({Role.INFERENCE}, 30.0),  # without a chunk
    },
    "rollmill.v1.EnvironmentService": {
        "CreateEpisode": Rpc(_PLAYING, 60.0, True, MOST_BYTES),
        "StepEpisode": Rpc(_PLAYING, 60.0, True, MOST_BYTES),
        "CloseEpisode": Rpc(_PLAYING, 5.0),
    },
    # plus the limits of the execution, or of the cases
    "rollmill.v1.CodeExecutionService": {"ExecuteCode": Rpc(_JUDGED, 10.0, True, MOST_BYTES)},
    "rollmill.v1.JudgeService": {"Judge": Rpc(_JUDGED, 60.0, True, MOST_BYTES)},
    "rollmill.v1.RewardService": {"ComputeReward": Rpc(_PLAYING, 60.0, True, MOST_BYTES)},
    "rollmill.v1.RunService": {
        # how a joining process learns its settings
        "GetRun": Rpc({Role.INFERENCE, Role.TRAINER, *_LOOKING}, 5.0, True),
        "PauseRun": Rpc({Role.OPERATOR}, 5.0, True),
        "ResumeRun": Rpc({Role.OPERATOR}, 5.0, True),
        "StopRun": Rpc({Role.OPERATOR}, 5.0, True),
    },
    # A replica polls the status of its gateway, a trainer that of its publisher.
    "rollmill.v1.StatusService": {
        "GetStatus": Rpc({*_LOOKING, Role.ORCHESTRATOR, Role.INFERENCE, Role.TRAINER}, 5.0, True)
    },
    # A container is probed with the bundle of its own process.
    "grpc.health.v1.Health": {"Check": Rpc({*SERVICES, *_LOOKING}), "List": Rpc(_LOOKING), "Watch": Rpc(_LOOKING)},
    "grpc.reflection.v1alpha.ServerReflection": {"ServerReflectionInfo": Rpc(_LOOKING)},
    "grpc.reflection.v1.ServerReflection": {"ServerReflectionInfo": Rpc(_LOOKING)},
}
DEADLINES = {name: rpc.deadline_s for methods in RPCS.values() for name, rpc in methods.items()}
REQUEST_BYTES = {name: rpc.request_bytes for methods in RPCS.values() for name, rpc in methods.items()}
HTTP: dict[str, Iterable[Role]] = {
    "endpoint": {Role.AGENT, Role.OPERATOR},
    "judge": {Role.CLIENT, Role.OPERATOR},
    "task_server": {Role.CLIENT, Role.OPERATOR},
    "metrics": _LOOKING,
    "page": _LOOKING,
}
_ALLOWED: dict[str, frozenset[Role]] = {
    f"/{service}/{name}": frozenset(rpc.roles) for service, methods in RPCS.items() for name, rpc in methods.items()
} | {f"http:{group}": frozenset(roles) for group, roles in HTTP.items()}


def allowed(what: str) -> frozenset[Role]:
    """The roles that may call a method (``/rollmill.v1.RunService/StopRun``) or a group of routes (``http:judge``)."""
    return _ALLOWED.get(what, frozenset())


def permit(found: Holder, what: str) -> None:
    """Raise ``PermissionDeniedError`` if the caller's role may not do ``what``."""
    roles = allowed(what)
    if found.role not in roles:
        allowed_roles = ", ".join(sorted(role.value for role in roles)) or "no role"
        raise PermissionDeniedError(
            f"role {found.role.value} may not call {what.removeprefix('http:').lstrip('/')}: allowed to {allowed_roles}",
            role=found.role.value,
        )


# --- TLS from an identity for everything that takes an ``ssl.SSLContext``: HTTP servers.


def server_context(who: Identity) -> ssl.SSLContext:
    """Takes callers in with a certificate of the run or without one, unless the run demands certificates.

    Renewed keys are used from the next handshake on.
    """
    made, generation = _server_context(who), who.generation

    def renewed(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        nonlocal made, generation
        _ = who.bundle  # looks at the files
        if generation != who.generation:
            made, generation = _server_context(who), who.generation
        if connection.context is not made:
            connection.context = made

    listening = _server_context(who)
    listening.sni_callback = renewed  # called for every handshake, with or without a name
    return listening


def _server_context(who: Identity) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(who.folder / files.CERTIFICATE, who.folder / files.KEY)
    context.load_verify_locations(cadata=who.bundle.ca.decode())
    context.verify_mode = ssl.CERT_REQUIRED if who.bundle.client_certificates else ssl.CERT_OPTIONAL
    return context
