"""All HTTP servers have the same checks of their callers: raw requests to each server of the project."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from aiohttp import web
from structlog.testing import capture_logs

from extras.code_judge.server import HttpServer
from extras.code_judge.settings import HttpConfig
from extras.prometheus.server import MetricsServer
from extras.worlds.settings import TaskServerConfig
from extras.worlds.taskserver import TaskServer
from services.common import http as origin
from services.common.config.processes import EndpointConfig
from services.common.errors import ConfigError
from services.common.extras import provided
from services.common.http import ANSWER_HEADERS, HOSTS_VARIABLE, allowed_hosts, is_served
from services.common.pb import status_pb2, status_pb2_grpc
from services.common.security import identity
from services.common.security.keys import Role
from services.common.telemetry.metrics import ProcessStatus
from services.inference.endpoint.server import EndpointServer
from tests.contract.run_servicer import RunServicer, make_server
from tests.keys import as_role, client_context, make_keys
from tests.waiting import WAIT_S

REPOSITORY = Path(__file__).parents[2]
BODY = b'{"type": "python", "solution": "print(1)"}'
JSON = {"Content-Type": "application/json"}

# Routes that answer, and those that do something; "GET" routes must be of the first kind.
READING = {
    "judge": {"/ping", "/status"},
    "task_server": {
        "/api/task/info", "/api/health", "/api/{task}/task/info", "/api/{task}/health",
    },
    "endpoint": {"/v1/models", "/v1/models/{name}", "/v1/v1/models", "/v1/v1/models/{name}", "/v1/responses/{id}"},
    "metrics": {"/metrics"},
    "page": {
        "/", "/assets/{name}", "/api/runs", "/api/curves", "/api/runs/{run}/rollouts/{number}", "/api/runs/{run}/{subject}",
    },
}  # fmt: skip
ASKED = {
    "judge": "/ping",
    "task_server": "/api/health",
    "endpoint": "/v1/models",
    "metrics": "/metrics",
    "page": "/api/runs",
}
TOLD = {
    "judge": "/run",
    "task_server": "/api/episode/start",
    "endpoint": "/v1/chat/completions",
    "metrics": "/metrics",
    "page": "/api/runs",
}
GROUPS = tuple(group for group in ASKED if group in provided("commands") or group != "page")  # the page is an extra


class _NoEnvironments:
    names_with_indices: tuple[str, ...] = ()
    absent: Mapping[str, str] = {}

    def require(self, name: str) -> None:
        """Every name will do."""


class _NoEpisodes:
    """No work is begun."""


def _status() -> ProcessStatus:
    return ProcessStatus(
        service="envgateway", instance_id="g", run_id="r", state="ready", started_at=0.0,
        gauges={}, labels={}, accounts=(),
    )  # fmt: skip


def make(group: str) -> Any:
    """The server of a group of routes, without a service behind the routes."""
    nothing: Any = None
    if group == "judge":
        return HttpServer(HttpConfig(port=0), "127.0.0.1", nothing, nothing)
    if group == "task_server":
        served: Any = {"environments": {"household_toy": {"end": 10}}}
        environments: Any = _NoEnvironments()
        episodes: Any = _NoEpisodes()
        return TaskServer(TaskServerConfig(port=0, **served), "127.0.0.1", episodes, environments)
    if group == "endpoint":
        return EndpointServer(EndpointConfig(port=0), "127.0.0.1", setting="endpoint.port")
    if group == "page":
        from extras.page.server import PageServer

        return PageServer((), "127.0.0.1", 0)
    return MetricsServer(_status, (), name="envgateway", host="127.0.0.1", port=0)


@dataclass
class Served:
    """A server, and which requests came through to its routes."""

    group: str
    port: int
    reached: list[str] = field(default_factory=list)

    async def send(self, head: str, body: bytes = b"") -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the answer to a raw request."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(head.encode("latin-1") + body)
        try:
            async with asyncio.timeout(WAIT_S):
                status = int((await reader.readline()).split()[1])
                headers = {}
                while line := (await reader.readline()).decode("latin-1").strip():
                    name, _, value = line.partition(":")
                    headers[name.lower()] = value.strip()
                size = 0 if head.startswith("HEAD ") else int(headers.get("content-length", 0))
                return status, headers, await reader.readexactly(size)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def ask(self, method: str, path: str, headers: Mapping[str, str], body: bytes = b"") -> tuple[int, str]:
        """Status and text; a Host of loopback and the length of the body are added where they are not given."""
        all_headers = {"Host": f"127.0.0.1:{self.port}", **headers}
        if body and "Content-Length" not in headers:
            all_headers["Content-Length"] = str(len(body))
        lines = "".join(f"{name}: {value}\r\n" for name, value in all_headers.items() if value != "-")
        status, _, told = await self.send(f"{method} {path} HTTP/1.1\r\n{lines}\r\n", body)
        return status, told.decode()


@pytest.fixture(params=GROUPS)
async def door(request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    server = make(request.param)
    application = server._listener._runner.app
    served = Served(request.param, 0)

    @web.middleware
    async def seen(asked: web.Request, handler: origin.Handler) -> web.StreamResponse:
        served.reached.append(f"{asked.method} {asked.path}")
        return await handler(asked)

    application.middlewares.append(seen)  # behind every check of the listener
    await server.start()
    served.port = server._listener.port
    yield served
    await server.stop()


# -- which doors there are ------------------------------------------------------------------------------------------------

# What opens a port, and the one file of the project that may: all of HTTP is a Listener.
OPENERS = {
    "AppRunner": "services/common/http.py",
    "TCPSite": "services/common/http.py",
    "start_server": "extras/deploy/forwarder.py",  # hands on the bytes of the orchestrator's gRPC port
    "add_insecure_port": "services/common/rpc/server.py",
    "add_secure_port": "services/common/rpc/server.py",
}


def test_every_port_of_the_project_is_opened_in_a_file_of_this_table() -> None:
    """And every file that makes a ``Listener`` is that of one of the servers below."""
    others = "run_app|start_http_server|create_server|start_unix_server|ThreadingHTTPServer|uvicorn|socketserver"
    opens = re.compile(rf"\b({'|'.join(OPENERS)}|{others}|Listener)\(")
    found: dict[str, set[str]] = {}
    for path in (path for top in ("services", "extras") for path in (REPOSITORY / top).rglob("*.py")):
        if path.parent.name not in ("pb", "tests"):
            for name in opens.findall(path.read_text()):
                found.setdefault(name, set()).add(str(path.relative_to(REPOSITORY)))
    makers = {path.removesuffix(".py").replace("/", ".") for path in found.pop("Listener")}
    assert found == {name: {path} for name, path in OPENERS.items()}
    assert makers == {type(make(group)).__module__ for group in GROUPS}


@pytest.mark.parametrize("group", GROUPS)
def test_what_a_get_asks_for_is_only_read(group: str) -> None:
    """A page can load anything with GET; so a new GET route must be looked at, and be added to the table."""
    routes = make(group)._listener.routes
    assert {path for method, path in routes if method == "GET"} == READING[group]
    assert {method for method, _ in routes} <= {"GET", "HEAD", "POST"}


# -- Host -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["127.0.0.1:{port}", "127.0.0.1", "localhost:{port}", "LocalHost", "127.8.9.1", "[::1]:7"]
)
async def test_names_of_loopback_are_served(door: Served, host: str) -> None:
    status, _ = await door.ask("GET", ASKED[door.group], {"Host": host.format(port=door.port)})
    assert status == (401 if door.group == "endpoint" else 200), "without a session the endpoint knows nobody"
    assert door.reached


FOREIGN = [
    "evil.test", "evil.test:{port}", "127.0.0.1.evil.test", "localhost.evil.test:{port}", "0.0.0.0:{port}", "127.1",
    "2130706433", "0x7f000001", "[::ffff:127.0.0.1]", "[::]", "::1", "[localhost]", "localhost.", "10.0.0.1",
    "127.0.0.1:99999", "127.0.0.1:", "127.0.0.1,evil.test", "evil@127.0.0.1", "127.0.0.1/evil", "localhost evil.test",
    "ｌocalhost".encode().decode("latin-1"), "",
]  # fmt: skip


async def test_a_foreign_host_is_refused_and_told_which_setting_permits_it(door: Served) -> None:
    for host in FOREIGN:
        for method, headers, body in (("GET", {}, b""), ("POST", JSON, BODY)):
            path = (ASKED if method == "GET" else TOLD)[door.group]
            status, told = await door.ask(method, path, {"Host": host.format(port=door.port), **headers}, body)
            assert status in (400, 421), (host, status)
            assert status == 400 or HOSTS_VARIABLE in told, (host, told)
    assert not door.reached


async def test_one_host_header_is_needed(door: Served) -> None:
    path = ASKED[door.group]
    for lines in (
        "",
        "Host: 127.0.0.1\r\nHost: 127.0.0.1\r\n",
        "Host: 127.0.0.1\r\nHost: evil.test\r\n",
        "Host: 127.0.0.1\r\nhOST: x\r\n",
    ):
        for version in ("1.1", "1.0"):
            status, _, _ = await door.send(f"GET {path} HTTP/{version}\r\n{lines}\r\n")
            assert status == 400, (lines, status)
    assert not door.reached


async def test_targets_that_name_a_host_themselves_are_refused(door: Served) -> None:
    path = ASKED[door.group]
    for target in (
        f"http://evil.test{path}",
        f"http://127.0.0.1:{door.port}{path}",
        f"//evil.test{path}",
        "*",
        "evil:80",
    ):
        status, _ = await door.ask("GET", target, {})
        assert status in (400, 404, 405), (target, status)
    assert not door.reached


def test_names_are_allowed_by_a_setting_and_wildcards_are_not() -> None:
    hosts = allowed_hosts({HOSTS_VARIABLE: "host.docker.internal, Judge"})
    assert hosts == {"host.docker.internal", "judge"}
    assert is_served("HOST.docker.internal:80", hosts) and is_served("judge", hosts) and is_served("127.0.0.1", hosts)
    assert not is_served("evil.judge", hosts) and not is_served("judge.evil", hosts) and not is_served("[judge]", hosts)
    assert allowed_hosts({}) == frozenset() == allowed_hosts({HOSTS_VARIABLE: " ,"})
    for wrong in ("*", "a b", "http://judge", "judge:80", "*.docker.internal", "a..b"):
        with pytest.raises(ConfigError, match=HOSTS_VARIABLE):
            allowed_hosts({HOSTS_VARIABLE: wrong})


async def test_a_listener_serves_the_names_that_its_environment_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOSTS_VARIABLE, "judge")
    server = make("judge")
    served = Served("judge", await server.start())
    try:
        assert (await served.ask("GET", "/ping", {"Host": "judge:80"}))[0] == 200
        assert (await served.ask("GET", "/ping", {"Host": "evil.test"}))[0] == 421
        assert (await served.ask("GET", "/ping", {"Host": "judge", "Origin": "http://judge"}))[0] == 403
    finally:
        await server.stop()


# -- pages ----------------------------------------------------------------------------------------------------------------


async def test_whatever_a_page_adds_to_its_requests_is_refused(door: Served) -> None:
    own = f"http://127.0.0.1:{door.port}"
    for added in (
        {"Origin": "http://evil.test"}, {"Origin": "null"}, {"Origin": own}, {"Origin": ""}, {"origin": "file://"},
        {"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}, {"Sec-Fetch-Site": "CROSS-SITE"},
        {"Sec-Fetch-Site": ""}, {"Sec-Fetch-Site": "same-origin, cross-site"},
    ):  # fmt: skip
        for method, headers, body in (("GET", {}, b""), ("HEAD", {}, b""), ("POST", JSON, BODY)):
            path = (TOLD if method == "POST" else ASKED)[door.group]
            status, _ = await door.ask(method, path, {**headers, **added}, b"" if method == "HEAD" else body)
            assert status == 403, (added, method, status)
    assert not door.reached
    for site in ("none", "same-origin"):  # typed into the browser, and followed from there
        status, _ = await door.ask("GET", ASKED[door.group], {"Sec-Fetch-Site": site})
        assert status in (200, 401)


async def test_a_page_gets_no_permission_and_no_connection_that_stays(door: Served) -> None:
    path = TOLD[door.group]
    asking = {"Origin": "http://evil.test", "Access-Control-Request-Method": "POST"}
    for headers in (asking, {}, {"Access-Control-Request-Private-Network": "true"}):
        assert (await door.ask("OPTIONS", path, headers))[0] == 405
    upgrade = {
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "eA==",
    }
    for headers in (upgrade, {**upgrade, "Upgrade": "WebSocket"}, {"Sec-WebSocket-Key": "eA=="}):
        assert (await door.ask("GET", ASKED[door.group], headers))[0] == 400
    for method in ("TRACE", "CONNECT"):
        status, _ = await door.ask(method, path if method == "TRACE" else "evil.test:80", {})
        assert status in (400, 405)
    assert not door.reached


async def test_answers_show_in_no_page_whatever_their_status(door: Served) -> None:
    host = f"Host: 127.0.0.1:{door.port}\r\n"
    asked = [
        f"GET {ASKED[door.group]} HTTP/1.1\r\n{host}\r\n",
        f"GET /nothing HTTP/1.1\r\n{host}\r\n",
        f"GET {ASKED[door.group]} HTTP/1.1\r\n{host}Origin: null\r\n\r\n",
        f"GET {ASKED[door.group]} HTTP/1.1\r\nHost: evil.test\r\n\r\n",
        f"POST {TOLD[door.group]} HTTP/1.1\r\n{host}Content-Length: 2\r\n\r\n{{}}",
    ]
    for head in asked:
        _, headers, _ = await door.send(head)
        assert {name: headers.get(name.lower()) for name in ANSWER_HEADERS} == ANSWER_HEADERS
        assert not any(name.startswith("access-control") for name in headers)


# -- bodies ---------------------------------------------------------------------------------------------------------------


async def test_bodies_are_json_by_their_type(door: Served) -> None:
    if door.group == "metrics":
        return  # takes no body
    path = TOLD[door.group]
    for given in (
        "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "text/json", "-",
        "application/octet-stream", "application/json, text/plain", "text/plain; application/json", "application/jsonp",
        "application/json; charset=utf-16", "application/json; boundary=x", "application/json;charset=utf-7", "",
    ):  # fmt: skip
        status, told = await door.ask("POST", path, {"Content-Type": given}, BODY)
        assert status == 415 and "application/json" in told, (given, status)
    for encoding in ("gzip", "deflate", "br", "identity"):
        assert (await door.ask("POST", path, {**JSON, "Content-Encoding": encoding}, BODY))[0] == 415
    two = (
        f"Host: localhost\r\nContent-Type: application/json\r\nContent-Type: text/plain\r\nContent-Length: {len(BODY)}"
    )
    assert (await door.send(f"POST {path} HTTP/1.1\r\n{two}\r\n\r\n", BODY))[0] in (400, 415)
    for form in ("text/plain", "application/x-www-form-urlencoded"):  # a form without fields
        assert (await door.ask("POST", path, {"Content-Type": form, "Content-Length": "0"}))[0] == 415
    assert not door.reached
    for given in ("application/json", "Application/JSON; charset=UTF-8", 'application/json;charset="utf-8"'):
        assert (await door.ask("POST", path, {"Content-Type": given}, b"{}"))[0] not in (403, 415)
    assert len(door.reached) == 3


# -- with keys ------------------------------------------------------------------------------------------------------------


async def test_with_keys_any_host_may_be_named_and_pages_are_refused_all_the_same(tmp_path: Path) -> None:
    import aiohttp

    keys = make_keys(tmp_path / "keys")
    operator = as_role(keys, Role.OPERATOR)
    with identity.used(as_role(keys, Role.ENVGATEWAY)):
        server = make("judge")
    port = await server.start()
    headers = {"Authorization": f"Bearer {operator.bundle.token}"}
    connector = aiohttp.TCPConnector(ssl=client_context(operator))
    try:
        async with aiohttp.ClientSession(f"https://127.0.0.1:{port}", headers=headers, connector=connector) as http:

            async def ask(added: dict[str, str]) -> int:
                async with http.get("/ping", headers=added) as answer:
                    return answer.status

            assert await ask({"Host": "judge.example.org"}) == 200
            assert await ask({"Origin": "https://judge.example.org"}) == 403
            assert await ask({"Sec-Fetch-Site": "cross-site"}) == 403
    finally:
        await server.stop()


# -- what is told ---------------------------------------------------------------------------------------------------------


async def test_refusals_are_logged_once_a_second_and_without_control_characters() -> None:
    server = make("judge")
    served = Served("judge", await server.start())
    try:
        with capture_logs() as logs:
            for number in range(20):
                status, told = await served.ask("GET", f"/ping?{number}", {"Origin": f"http://{'x' * 500}\t{number}"})
                assert status == 403 and len(told) < 400
    finally:
        await server.stop()
    refused = [line for line in logs if line["event"] == "http.refused"]
    assert 1 <= len(refused) < 20 and all("\t" not in line["error"] for line in refused)


async def test_what_is_no_http_is_logged_once_a_second_and_without_a_trace(caplog: pytest.LogCaptureFixture) -> None:
    server = make("judge")
    served = Served("judge", await server.start())
    try:
        with capture_logs() as logs:
            for line in ("GET / HTTP/9\r\n", "G\x00T / HTTP/1.1\r\n", "GET / HTTP/1.1\r\nHost : x\r\n") * 7:
                assert (await served.send(f"{line}\r\n"))[0] == 400
    finally:
        await server.stop()
    assert not caplog.records, "nothing through the library's own log"
    assert 1 <= sum(line["event"] == "http.malformed" for line in logs) < 20


# -- gRPC -----------------------------------------------------------------------------------------------------------------


async def test_requests_of_http_1_do_nothing_at_a_grpc_port() -> None:
    """A browser speaks HTTP/2 over TLS only, so without keys a browser can send a gRPC port only HTTP/1.1."""
    servicer = RunServicer()
    server = make_server(servicer)
    await server.start()
    path = "/rollmill.v1.RunService/StopRun"
    try:
        for head in (
            f"POST {path} HTTP/1.1\r\nHost: {server.address}\r\nContent-Type: application/grpc\r\n",
            f"POST {path} HTTP/1.1\r\nHost: {server.address}\r\nContent-Type: application/grpc-web-text\r\n",
            f"POST {path} HTTP/1.1\r\nHost: {server.address}\r\nUpgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\n"
            "HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n",
            f"POST {path} HTTP/1.1\r\nHost: {server.address}\r\nOrigin: http://evil.test\r\nContent-Type: text/plain\r\n",
            # The preface of HTTP/2 in a body: the server looks for it at the beginning of a connection alone.
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 24\r\n\r\nPRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(head.encode() + b"Content-Length: 5\r\n\r\n" + bytes(5))
            async with asyncio.timeout(WAIT_S):
                with contextlib.suppress(ConnectionError):
                    told = await reader.read()
                    assert b"200 OK" not in told and b"101 Switching" not in told and b"grpc-status: 0" not in told
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
        async with grpc.aio.insecure_channel(server.address) as channel:
            stub = status_pb2_grpc.StatusServiceStub(channel)
            await stub.GetStatus(status_pb2.GetStatusRequest(), timeout=WAIT_S)
        assert not server._stop_requested.is_set()
    finally:
        await server.stop(grace_s=1.0)


async def test_the_endpoint_refuses_in_the_words_of_its_clients() -> None:
    server = make("endpoint")
    served = Served("endpoint", await server.start())
    try:
        for headers, status in (({"Host": "evil.test", **JSON}, 421), ({"Content-Type": "text/plain"}, 415)):
            found, told = await served.ask("POST", "/v1/chat/completions", headers, b"{}")
            assert found == status and json.loads(told)["error"]["type"] == "invalid_request_error"
    finally:
        await server.stop()
