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
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from benchmarks import _pages
from benchmarks._doors import Door, Tally, ask_bulk, knock, summary, visit
from benchmarks._fuzzing import Line, Outcome, fuzz, resident_mib
from benchmarks._hostile import Hostile, all_rpcs
from benchmarks._report import report
from benchmarks._secure_services import Services, prepared
from benchmarks._visitors import Visitor, Visitors
from benchmarks._weight_versions import POLICY, RUN
from services.cli.keys import Keyring
from services.common.config.envgateway import HttpConfig, TaskServerConfig
from services.common.config.processes import EndpointConfig
from services.common.pb import status_pb2, status_pb2_grpc, weights_pb2, weights_pb2_grpc
from services.common.security.identity import allowed
from services.common.security.keys import Role
from services.common.telemetry.logs import LogEvent

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
    for certificates in (False, True):
        with tempfile.TemporaryDirectory(prefix="rollmill-doors-") as name:
            folder = Path(name)
            keys = Keyring.make(folder / "keys", RUN, client_certificates=certificates)
            visitors = Visitors(keys, folder)
            with prepared(folder, keys=keys) as services:
                if only != "fuzzing":
                    await services.start()
                    guests = await _try_rpcs(services, visitors, tally)
                    await _try_routes(services, visitors, tally)
                    if not certificates:  # the checks come before either
                        await _try_pages(services, visitors, tally)
                    await _try_bulk(services, visitors, tally)
                    await _let_in(guests, visitors, tally)
            if not certificates and only != "fuzzing":
                (folder / "plain").mkdir()
                with prepared(folder / "plain", names=("orchestrator", "envgateway", "inference")) as services:
                    await services.start()
                    await _try_pages(services, None, tally)
            if not certificates and only != "doors":
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
            for request in _pages.faulty(method, asked, address, any_host=visitors is not None):
                refused, told = await _pages.send(address, request, context, token)
                tally.intruder(f"page: {request.name}", f"{request.method} {group} {asked}", told, refused)
            # That a route has no use for an empty object is its own word, and told with 400 too.
            if method == "GET":
                refused, told = await _pages.send(address, _pages.faultless(method, asked, address), context, token)
                tally.guest(f"a program at {method} {group} {asked}", told, refused and "status 400" not in told)


def _routes() -> dict[str, list[tuple[str, str]]]:
    """Method and path of everything that the HTTP servers register; made here for their routers only."""
    from extras.worlds.taskserver import TaskServer
    from services.envgateway.http import HttpServer
    from services.inference.endpoint.server import EndpointServer

    nothing: Any = None
    served = {"environments": {"household_toy": {"end": 10}}}
    servers: dict[str, Any] = {
        "judge": HttpServer(HttpConfig(port=0), "127.0.0.1", nothing, nothing),
        "task_server": TaskServer(TaskServerConfig(port=0, **served), "127.0.0.1", nothing, _NoEnvironments(), 1.0),  # type: ignore[arg-type]
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
