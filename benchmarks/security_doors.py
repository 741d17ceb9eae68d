"""Tries every door of every service with the wrong keys and with the right ones, then sends hostile messages through
them.

*Doors.* Four services start with a run's keys: orchestrator, inference, weight publisher, gateway. The RPCs are those
that each server's reflection lists, the HTTP routes those that the judge, the task server and the endpoint register.
Each is tried without keys, with every wrong role, with expired keys, with another run's, with those of a run of the
same name, and in plain text; first with run tokens, then (services started anew) with client certificates. The bulk
plane (ZeroMQ) is tried without CURVE, with another server's key, and without a ticket. Every right role tries too, and
must get in.

*Pages.* Each HTTP route, the metrics' too, gets the requests that a web page can send (a foreign Host, Origin,
Sec-Fetch-Site, types of forms, OPTIONS, WebSockets) and requests that can be read in two ways: with a right caller's
keys, and from services without keys. Without the fault the same request must pass.

*Fuzzing.* Seeded hostile requests (``_hostile.py``) go to every RPC, in a permitted role: extremes, wrong types,
broken UTF-8, wrong lengths, nesting, cut and flipped bytes. No process may crash, no answer may be INTERNAL or UNKNOWN,
memory must stay bounded. StopRun only gets unparsable requests: others would stop the service.

Keys of the last line: ``tried`` = ``refused``; ``admitted`` = ``admitted_expected``; ``fuzzed``, ``crashes``,
``internal_errors`` (answers, and failures in the services' logs), ``rss_growth_mib`` by service.

    python benchmarks/security_doors.py [--quick] [--seed 1] [--messages 100000]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import ssl
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import zmq
import zmq.asyncio
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from benchmarks._bench import report
from benchmarks._fuzzing import Line, Outcome, fuzz, resident_mib
from benchmarks._hostile import Hostile, all_rpcs
from benchmarks._secure_services import Services, prepared
from benchmarks._weight_versions import POLICY, RUN
from extras.code_judge.settings import HttpConfig
from extras.worlds.settings import TaskServerConfig
from services.cli.keys import CA_KEY, TOKEN_KEY, Keyring
from services.common.config.processes import EndpointConfig
from services.common.pb import status_pb2, status_pb2_grpc, weights_pb2, weights_pb2_grpc
from services.common.rpc.client import channel_options
from services.common.security import certificates, tokens
from services.common.security.certificates import Pair
from services.common.security.identity import allowed
from services.common.security.keys import CA, CERTIFICATE, KEY, Peer, Role
from services.common.telemetry.logs import LogEvent
from services.common.transfer.bulk import REQUEST, TICKET_BYTES, speak_to

# --- Attempts to get in, one per (door, visitor), and whether the door held. Knows the forms of a refusal, but no
# service.


REFUSALS = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAVAILABLE)
_CALL_S = 3.0
_STREAM_S = 1.0  # of one that is let in and has nothing to say
_BULK_S = 1.0
Metadata = tuple[tuple[str, str], ...]


@dataclass(slots=True)
class Tally:
    """The outcomes of the attempts."""

    tried: Counter[str] = field(default_factory=Counter)  # by visitor
    refused: Counter[str] = field(default_factory=Counter)
    let_in: list[str] = field(default_factory=list)  # attempts that should have been refused
    kept_out: list[str] = field(default_factory=list)  # the right role, refused
    admitted: int = 0
    expected: int = 0

    def intruder(self, visitor: str, door: str, told: str, refused: bool) -> None:
        self.tried[visitor] += 1
        self.refused[visitor] += refused
        if not refused:
            self.let_in.append(f"{visitor} at {door}: {told}")

    def guest(self, door: str, told: str, refused: bool) -> None:
        self.expected += 1
        self.admitted += not refused
        if refused:
            self.kept_out.append(f"{door}: {told}")


@dataclass(frozen=True, slots=True)
class Door:
    """One RPC."""

    path: str
    streams_in: bool
    streams_out: bool


async def knock(
    channel: grpc.aio.Channel, door: Door, metadata: Metadata = (), patience: float = 1.0
) -> tuple[bool, str]:
    """Call with an empty message: (refused, answer). ``patience``: times the usual deadline."""
    deadline = patience * (_STREAM_S if door.streams_in or door.streams_out else _CALL_S)
    try:
        if door.streams_out:
            if door.streams_in:  # nothing is written: a refusal in the middle of it would be told as another error
                answers: Any = channel.stream_stream(door.path)(timeout=deadline, metadata=metadata)
            else:
                answers = channel.unary_stream(door.path)(b"", timeout=deadline, metadata=metadata)
            await answers.read()
            answers.cancel()
        else:
            await channel.unary_unary(door.path)(b"", timeout=deadline, metadata=metadata)
    except grpc.aio.AioRpcError as error:
        return error.code() in REFUSALS, f"{error.code().name} {error.details()}"
    return False, "an answer"


async def visit(url: str, method: str, context: ssl.SSLContext | None, token: str | None) -> tuple[bool, str]:
    """One HTTP request with an empty body."""
    headers = {"Authorization": f"Bearer {token}"} if token is not None else {}
    connector = aiohttp.TCPConnector(ssl=context if context is not None else False)
    timeout = aiohttp.ClientTimeout(total=_CALL_S)
    try:
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
            session.request(method, url, headers=headers) as answer,
        ):
            # Routes have 401s of their own; the access check says what it wants to see.
            refused = answer.status == 403 or (answer.status == 401 and "WWW-Authenticate" in answer.headers)
            return refused, f"status {answer.status}"
    except (aiohttp.ClientSSLError, aiohttp.ClientConnectionError) as error:
        return True, f"{type(error).__name__}: {error}"


async def ask_bulk(endpoint: str, server_key: bytes | None, ticket: bytes | None) -> tuple[bool, str]:
    """One request for bytes over ZeroMQ. Silence is a refusal here: CURVE does not answer unknown keys."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    try:
        if server_key is not None:
            speak_to(socket, server_key)
        socket.connect(endpoint)
        await socket.send(REQUEST.pack(ticket or bytes(TICKET_BYTES), 0, 1024))
        if not await socket.poll(int(_BULK_S * 1000)):
            return True, "silence"
        head, *_ = await socket.recv_multipart()
        return not head, "data" if head else "an error"
    finally:
        socket.close(0)
        context.term()


def summary(tally: Tally, shown: int = 20) -> dict[str, object]:
    """For the report: counts and failures."""
    return {
        "tried": tally.tried.total(),
        "refused": tally.refused.total(),
        "tried_by_visitor": dict(tally.tried),
        "admitted": tally.admitted,
        "admitted_expected": tally.expected,
        "let_in": _few(tally.let_in, shown),
        "kept_out": _few(tally.kept_out, shown),
    }


def _few(lines: Sequence[str], most: int) -> Iterable[str]:
    return list(lines[:most])


# --- The visitors that try the doors: callers to refuse, and the right roles, with tokens or with certificates.


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


# --- Requests that a page in a browser can cause, or that can be read in two ways, as bytes; and the callers to refuse.


PAGE_REFUSALS = (400, 403, 405, 415, 421)
_PAGE_CALL_S = 5.0
_BODY = b'{"type": "python", "solution": "print(1)", "name": "household_toy", "index": 1, "messages": []}'
_FOREIGN = (
    "evil.test",
    "127.0.0.1.evil.test",
    "0.0.0.0",
    "127.1",
    "[::ffff:127.0.0.1]",
    "localhost.",
    "localhost@evil.test",
)
_JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request; ``name`` is its fault, empty for one without."""

    name: str
    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    body: bytes = b""

    def encode(self, token: str | None) -> bytes:
        shown = (("Authorization", f"Bearer {token}"),) if token is not None else ()
        size = (("Content-Length", str(len(self.body))),) if self.method == "POST" else ()
        lines = "".join(f"{name}: {value}\r\n" for name, value in (*self.headers, *shown, *size))
        return f"{self.method} {self.target} HTTP/1.1\r\n{lines}\r\n".encode("latin-1") + self.body


def faulty(method: str, path: str, host: str, *, any_host: bool) -> Iterator[Request]:
    """Every fault at a route; ``any_host``: the server has keys, and serves any Host."""
    body = _BODY if method == "POST" else b""
    own = _JSON if body else {}

    def made(name: str, added: dict[str, str], target: str = path, verb: str = method, given: bytes = body) -> Request:
        headers = {"Host": host, **own, **added}
        return Request(name=name, method=verb, target=target, headers=tuple(headers.items()), body=given)

    if not any_host:
        for foreign in _FOREIGN:
            yield made("foreign host", {"Host": foreign})
        yield made("rebinding", {"Host": "evil.test", "Origin": "http://evil.test", "Sec-Fetch-Site": "same-origin"})
    for origin in ("http://evil.test", "null", f"http://{host}", "https://localhost", ""):
        yield made("origin", {"Origin": origin})
    for site in ("cross-site", "same-site"):
        yield made("another site", {"Sec-Fetch-Site": site})
    yield made("two hosts", {"Host": f"{host}\r\nHost: evil.test"})
    for target in (f"http://{host}{path}", f"//evil.test{path}"):
        yield made("target", {}, target=target)
    yield made(
        "preflight", {"Origin": "http://evil.test", "Access-Control-Request-Method": method}, verb="OPTIONS", given=b""
    )
    yield made("options", {}, verb="OPTIONS", given=b"")
    yield made("websocket", {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Key": "eA=="})
    if body:
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "text/json"):
            yield made("type", {"Content-Type": kind})
        yield made("type", {"Content-Type": "application/json\r\nContent-Type: text/plain"})
        yield made("encoding", {"Content-Encoding": "gzip"})


def faultless(method: str, path: str, host: str) -> Request:
    """The same without a fault; its body may still be invalid for the route."""
    headers = {"Host": host, **(_JSON if method == "POST" else {})}
    return Request(
        name="", method=method, target=path, headers=tuple(headers.items()), body=b"{}" if method == "POST" else b""
    )


async def send(address: str, request: Request, context: ssl.SSLContext | None, token: str | None) -> tuple[bool, str]:
    """(refused, answer)."""
    host, _, port = address.rpartition(":")
    name = host if context is not None else None
    async with asyncio.timeout(_PAGE_CALL_S):
        reader, writer = await asyncio.open_connection(host, int(port), ssl=context, server_hostname=name)
        try:
            writer.write(request.encode(token))
            status = int((await reader.readline()).split()[1])
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                await writer.wait_closed()
    return status in PAGE_REFUSALS, f"status {status}"


# --- The benchmark itself.


QUICK, FULL = 1_500, 100_000
RSS_BOUND_MIB = 256.0
_STOPPING = "/rollmill.v1.RunService/StopRun"
Guest = tuple[str, Door, Visitor]  # address first
_WARM_UP = 0.1  # of the messages, before memory is measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK:,} hostile messages; about a minute")
    parser.add_argument("--messages", type=int, help=f"hostile messages over all services (default {FULL:,})")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=("doors", "fuzzing"), help="leave the other half out")
    options = parser.parse_args()
    count = options.messages or (QUICK if options.quick else FULL)
    began = time.monotonic()
    tally, by_service = asyncio.run(_run(count, options.seed, options.only))
    sums = {key: sum(found[key] for found in by_service.values()) for key in ("fuzzed", "crashes", "internal_errors")}
    tried, refused = tally.tried.total(), tally.refused.total()
    report(
        "security_doors",
        float(refused),
        float(tried),
        refused / tried if tried else 1.0,
        0.0,
        unit="attempts refused, of attempts that must be",
        **summary(tally),
        **sums,
        rss_growth_mib={name: found["rss_growth_mib"] for name, found in by_service.items()},
        rss_bound_mib=RSS_BOUND_MIB,
        services=by_service,
        seconds=time.monotonic() - began,
        seed=options.seed,
    )


async def _run(count: int, seed: int, only: str | None) -> tuple[Tally, dict[str, dict[str, Any]]]:
    tally, fuzzed = Tally(), {}
    for with_certificates in (False, True):
        with tempfile.TemporaryDirectory(prefix="rollmill-doors-") as name:
            folder = Path(name)
            keys = Keyring.make(folder / "keys", RUN, client_certificates=with_certificates)
            visitors = Visitors(keys, folder)
            with prepared(folder, keys=keys) as services:
                if only != "fuzzing":
                    await services.start()
                    guests = await _try_rpcs(services, visitors, tally)
                    await _try_routes(services, visitors, tally)
                    if not with_certificates:  # the checks come before either
                        await _try_pages(services, visitors, tally)
                    await _try_bulk(services, visitors, tally)
                    await _let_in(guests, visitors, tally)
            if not with_certificates and only != "fuzzing":
                (folder / "plain").mkdir()
                with prepared(folder / "plain", names=("orchestrator", "envgateway", "inference")) as services:
                    await services.start()
                    await _try_pages(services, None, tally)
            if not with_certificates and only != "doors":
                (folder / "fuzzed").mkdir()
                with prepared(folder / "fuzzed", keys=keys) as services:  # those of before were told to stop
                    await services.start()
                    fuzzed = await _fuzz(services, visitors, count, seed)
    return tally, fuzzed


# --- doors -----------------------------------------------------------------------------------------------------------


async def _try_rpcs(services: Services, visitors: Visitors, tally: Tally) -> list[Guest]:
    """All attempts that must be refused; returns those that must be accepted."""
    guests: list[Guest] = []
    room = asyncio.Semaphore(8)

    async def attempt(name: str, door: Door, visitor: Visitor) -> None:
        async with room, visitors.channel(services.addresses[name], visitor) as channel:
            refused, told = await knock(channel, door, visitor.metadata())
            if told.startswith(
                grpc.StatusCode.DEADLINE_EXCEEDED.name
            ):  # let in, or a machine too busy to refuse in time
                refused, told = await knock(channel, door, visitor.metadata(), patience=10.0)
        tally.intruder(visitor.name, f"{name} {door.path}", told, refused)

    for name, address in services.addresses.items():
        doors = await _reflected(address, visitors)
        attempts = [(door, visitor) for door in doors for visitor in visitors.of(door.path)]
        guests += [(address, door, visitor) for door, visitor in attempts if visitor.is_guest]
        await asyncio.gather(*(attempt(name, door, visitor) for door, visitor in attempts if not visitor.is_guest))
    return guests


async def _let_in(guests: list[Guest], visitors: Visitors, tally: Tally) -> None:
    """Comes last, because these calls are obeyed: the role that may stop the run does so."""
    for address, door, visitor in sorted(guests, key=lambda guest: guest[1].path == _STOPPING):
        async with visitors.channel(address, visitor) as channel:
            refused, told = await knock(channel, door, visitor.metadata())
        tally.guest(f"{visitor.name} at {door.path}", told, refused)


async def _reflected(address: str, visitors: Visitors) -> list[Door]:
    """Every method of every service that the server itself lists."""
    viewer = _guest(visitors, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
    async with visitors.channel(address, viewer) as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), metadata=viewer.metadata(), timeout=10.0
        )
        answer = await call.read()
    pool = descriptor_pool.Default()  # has what this process has imported, which is every proto of the project
    methods = [
        (service.name, method)
        for service in answer.list_services_response.service
        for method in pool.FindServiceByName(service.name).methods
    ]
    return [
        Door(f"/{name}/{method.name}", method.client_streaming, method.server_streaming) for name, method in methods
    ]


async def _try_routes(services: Services, visitors: Visitors, tally: Tally) -> None:
    for group, routes in _routes().items():
        for visitor in visitors.of(f"http:{group}"):
            context = visitors.context(visitor)
            for method, path in routes:
                scheme = "https" if visitor.tls else "http"
                url = f"{scheme}://{services.http[group]}{path.replace('{task}', 'household_toy')}"
                refused, told = await visit(url, method, context, visitor.token)
                if visitor.is_guest:
                    tally.guest(f"{visitor.name} at {method} {url}", told, refused)
                else:
                    tally.intruder(visitor.name, f"{method} {url}", told, refused)


async def _try_pages(services: Services, visitors: Visitors | None, tally: Tally) -> None:
    """Without ``visitors`` the services have no keys."""
    for group, routes in _routes().items():
        guest = _guest(visitors, f"http:{group}") if visitors is not None else None
        context = visitors.context(guest) if visitors is not None and guest is not None else None
        token = guest.token if guest is not None else None
        address = services.http[group]
        for method, path in routes:
            asked = path.replace("{task}", "household_toy")
            for request in faulty(method, asked, address, any_host=visitors is not None):
                refused, told = await send(address, request, context, token)
                tally.intruder(f"page: {request.name}", f"{request.method} {group} {asked}", told, refused)
            # That a route has no use for an empty object is its own word, and told with 400 too.
            if method == "GET":
                refused, told = await send(address, faultless(method, asked, address), context, token)
                tally.guest(f"a program at {method} {group} {asked}", told, refused and "status 400" not in told)


def _routes() -> dict[str, list[tuple[str, str]]]:
    """Method and path of everything that the HTTP servers register; made here for their routers only."""
    from extras.code_judge.server import HttpServer
    from extras.worlds.taskserver import TaskServer
    from services.inference.endpoint.server import EndpointServer

    nothing: Any = None
    served = {"environments": {"household_toy": {"end": 10}}}
    servers: dict[str, Any] = {
        "judge": HttpServer(HttpConfig(port=0), "127.0.0.1", nothing, nothing),
        "task_server": TaskServer(TaskServerConfig(port=0, **served), "127.0.0.1", nothing, _NoEnvironments()),  # type: ignore[arg-type]
        "endpoint": EndpointServer(EndpointConfig(port=0), "127.0.0.1", setting="endpoint.port"),
    }
    found = {group: [pair for pair in server.routes if pair[0] != "HEAD"] for group, server in servers.items()}
    return {**found, "metrics": [("GET", "/metrics")]}


class _NoEnvironments:
    names_with_indices: tuple[str, ...] = ()

    def require(self, name: str) -> None:
        """Every name will do."""


async def _try_bulk(services: Services, visitors: Visitors, tally: Tally) -> None:
    guest = _guest(visitors, "/rollmill.v1.WeightService/GetManifest")
    async with visitors.channel(services.addresses["publisher"], guest) as channel:
        stub = weights_pb2_grpc.WeightServiceStub(channel)
        request = weights_pb2.GetManifestRequest(
            run_id=RUN, policy=POLICY, version=1, transports=[weights_pb2.WEIGHT_TRANSPORT_BULK]
        )
        offered = (await stub.GetManifest(request, metadata=guest.metadata(), timeout=10.0)).bulk
    another = os.urandom(32)
    for visitor, key, ticket in (
        ("no CURVE", None, offered.ticket),
        ("another server's CURVE key", another, offered.ticket),
        ("no ticket", offered.server_key, None),
        ("another ticket", offered.server_key, os.urandom(32)),
    ):
        refused, told = await ask_bulk(offered.endpoint, key, ticket)
        tally.intruder(visitor, "bulk plane", told, refused)
    refused, told = await ask_bulk(offered.endpoint, offered.server_key, offered.ticket)
    tally.guest("inference at the bulk plane", told, refused)


def _guest(visitors: Visitors, path: str) -> Visitor:
    return next(visitor for visitor in visitors.of(path) if visitor.is_guest)


# --- fuzzing ---------------------------------------------------------------------------------------------------------


async def _fuzz(services: Services, visitors: Visitors, count: int, seed: int) -> dict[str, dict[str, Any]]:
    found = {}
    for number, (name, address) in enumerate(services.addresses.items()):
        paths = {door.path for door in await _reflected(address, visitors)}
        rpcs = [rpc for rpc in all_rpcs() if rpc.path in paths]
        share, rng = count // len(services.addresses), random.Random(seed + number)
        pid = services.processes[name].pid
        hostile = Hostile(seed + number, _KNOWN, spared=frozenset({_STOPPING}))

        def connect(address: str = address, rng: random.Random = rng) -> Line:
            operator = Visitor("fuzzer", True)
            # Other tokens than before: a caller who was over a limit would be told so again.
            fresh = {role: visitors.token(role) for role in Role}

            def metadata(path: str) -> tuple[tuple[str, str], ...]:
                roles = sorted(allowed(path), key=lambda role: role.value)
                return (("authorization", f"Bearer {fresh[rng.choice(roles)]}"),)

            return Line(visitors.channel(address, operator), metadata)

        warm = await fuzz(connect, rpcs, hostile, int(share * _WARM_UP), seed=seed)
        before = resident_mib(pid)
        outcome = await fuzz(connect, rpcs, hostile, share - int(share * _WARM_UP), seed=seed + 1)
        alive = services.processes[name].poll() is None and await _well(name, address, visitors)
        found[name] = _figures(warm, outcome, alive, resident_mib(pid) - before if alive else 0.0, services.log(name))
    return found


def _figures(warm: Outcome, outcome: Outcome, alive: bool, growth: float, log: str) -> dict[str, Any]:
    bugs = [*warm.bugs, *outcome.bugs]
    codes = warm.codes + outcome.codes
    by_code: dict[str, int] = {}
    for key, number in codes.items():
        code = key.rpartition(" ")[2]
        by_code[code] = by_code.get(code, 0) + number
    return {
        "fuzzed": warm.sent + outcome.sent,
        "rpcs": len({key.partition(" ")[0] for key in codes}),
        "crashes": int(not alive),
        "internal_errors": warm.num_bugs + outcome.num_bugs + log.count(LogEvent.RPC_FAILED),
        "rss_growth_mib": growth,
        "answers": by_code,
        "bugs": [f"{path} {told} {request[:60].hex()}" for path, told, request in bugs[:5]],
    }


async def _well(name: str, address: str, visitors: Visitors) -> bool:
    """Whether health says SERVING and a healthy call gets the right answer."""
    viewer = _guest(visitors, "/rollmill.v1.StatusService/GetStatus")
    operator = next(v for v in visitors.of("/grpc.health.v1.Health/Check") if v.is_guest and v.name == "operator")
    try:
        async with visitors.channel(address, viewer) as channel:
            health = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), metadata=operator.metadata(), timeout=10.0
            )
            status = await status_pb2_grpc.StatusServiceStub(channel).GetStatus(
                status_pb2.GetStatusRequest(), metadata=viewer.metadata(), timeout=10.0
            )
    except grpc.aio.AioRpcError:
        return False
    return bool(health.status == health_pb2.HealthCheckResponse.SERVING and status.service == name)


_KNOWN = {
    "policy": [POLICY],
    "run_id": [RUN],
    "replica_id": ["r1", "r2"],
    "incarnation": ["i1", "i2"],
    "environment": ["household_toy", "single_step", "tool", "tools"],
    "reward": ["math", "boxed", "code"],
    "language": ["python", "cpp", ""],
    "code": ["print(1)", "1/0", "def f(x): return x"],
    "entry_point": ["f", "Solution().f"],
    "payload_id": [f"{POLICY}:1"],
}


if __name__ == "__main__":
    main()
