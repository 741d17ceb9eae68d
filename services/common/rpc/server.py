"""The one server recipe: health, reflection, status, structured errors, graceful stop.

server = Server(service="orchestrator", instance_id="orchestrator", host="127.0.0.1", port=50050)
server.add(pool_pb2_grpc.add_PoolServiceServicer_to_server, servicer, "rollmill.v1.PoolService")
await server.start()            # answers; health says NOT_SERVING
server.set_ready()              # after warm-up; health says SERVING
await server.wait_for_stop()    # SIGTERM or SIGINT
await server.stop()             # refuse, end long streams, drain, close
"""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from services.common.aio import deadline
from services.common.errors import ConfigError
from services.common.net import hosts
from services.common.pb import status_pb2, status_pb2_grpc
from services.common.rpc.client import KEEPALIVE, fixed_window, server_credentials
from services.common.rpc.interceptors import Around, CallInterceptor, server_options
from services.common.security import identity
from services.common.security.identity import check_bind
from services.common.telemetry.accounts import AccountState
from services.common.telemetry.logs import LogEvent
from services.common.telemetry.metrics import ProcessStatus
from services.common.wire import write

log = structlog.get_logger()

REQUEST_WINDOW = 256 << 10  # a message of records; a thousand members may fill theirs at once
STATUS_SERVICE = "rollmill.v1.StatusService"
GRACE_S = 5.0
STOP_CALLBACK_S = 30.0
PORT_PATIENCE_S = 5.0  # for a port that a previous process has not released yet
_PORT_LOOK_S = 0.2

Gauges = Callable[[], Mapping[str, float]]
Labels = Callable[[], Mapping[str, str]]
Accounts = Callable[[], Iterable[AccountState]]


class Server:
    """A gRPC server of one process: with keys over TLS to permitted roles, without keys on loopback only.

    Raises ``ConfigError`` for another bind without keys, for keys of another run, and for a taken port.

    ``port_setting`` is the port's path in the recipe, for that error; left out, ``<service>.port``. ``around``:
    entered round every call that is let in; their errors are sent like all others.
    """

    def __init__(
        self,
        *,
        service: str,
        instance_id: str,
        host: str,
        port: int,
        run_id: str = "",
        port_setting: str = "",
        around: Sequence[Around] = (),
    ) -> None:
        self.identity = identity.current()
        check_bind(service, host, self.identity, run_id)
        self.service = service
        self.host = host
        self.port = port
        self._port_setting = port_setting or f"{service}.port"
        self._server = grpc.aio.server(
            interceptors=[CallInterceptor(self.identity, around)],
            options=[
                *KEEPALIVE,
                *server_options(service),
                *fixed_window(REQUEST_WINDOW),
                ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
                ("grpc.so_reuseport", 0),  # or two services would share a port and each see half of the calls
            ],
        )
        self._health = health.aio.HealthServicer()
        self._names: list[str] = []
        self._status = _StatusServicer(service, instance_id, run_id)
        self._on_stop: list[Callable[[], Awaitable[None] | None]] = []
        self._stop_requested = asyncio.Event()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, _ByName(self._server))
        self.add(status_pb2_grpc.add_StatusServiceServicer_to_server, self._status, STATUS_SERVICE)

    @property
    def address(self) -> str:
        return hosts.address(self.host, self.port)

    def add(self, add_to_server: Callable[[Any, Any], None], servicer: object, name: str) -> None:
        """Serve a servicer under its full service name."""
        add_to_server(servicer, _ByName(self._server))
        self._names.append(name)

    def on_stop(self, callback: Callable[[], Awaitable[None] | None]) -> None:
        """Called when the stop begins and new calls are refused: end long streams here, or the stop lasts the full
        grace. In the order of registration; one that fails does not keep the next from being called."""
        self._on_stop.append(callback)

    def set_gauges(self, gauges: Gauges, labels: Labels = dict) -> None:
        """Numbers and texts that GetStatus shows."""
        self._status.gauges, self._status.labels = gauges, labels

    def set_accounts(self, accounts: Accounts) -> None:
        """Where this process's time goes, for GetStatus."""
        self._status.accounts = accounts

    def status(self) -> ProcessStatus:
        """The present answer of GetStatus."""
        return self._status.now()

    async def start(self) -> int:
        """Bind and answer; returns the port. Health says NOT_SERVING until ``set_ready``.

        Waits a little for a port that is taken: a process that is started again may come before its predecessor has gone.
        """
        reflected = reflection.aio.ReflectionServicer([*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME])
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(reflected, _ByName(self._server))
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        until = time.monotonic() + PORT_PATIENCE_S
        while True:
            if self._bind(is_last_try=time.monotonic() >= until):
                break
            await asyncio.sleep(_PORT_LOOK_S)
        self._heed_signals()
        await self._server.start()
        log.info(LogEvent.SERVER_LISTENING, service=self.service, address=self.address, tls=self.identity is not None)
        return self.port

    def _bind(self, *, is_last_try: bool) -> bool:
        try:
            if self.identity is None:
                self.port = self._server.add_insecure_port(self.address)
            else:
                self.port = self._server.add_secure_port(self.address, server_credentials(self.identity))
        except RuntimeError:  # grpc keeps the reason to itself
            why = _why_not(self.host, self.port)
            if not is_last_try and why in (_IN_USE, _WAS_IN_USE):
                return False
            raise ConfigError(
                f"{self.service} cannot listen on {self.address}: {why}; stop the process that holds "
                f"the port, or give this service another with {self._port_setting} in the recipe (0 takes a free one)"
            ) from None
        return True

    def set_ready(self) -> None:
        """Say SERVING: only after warm-up."""
        self._status.state = "ready"
        for name in ("", *self._names):
            # The servicer's setter is a coroutine without a wait inside; a task keeps this callable from anywhere.
            _KEEP.add(task := asyncio.ensure_future(self._health.set(name, health_pb2.HealthCheckResponse.SERVING)))
            task.add_done_callback(_KEEP.discard)
        log.info(LogEvent.SERVER_READY, service=self.service, address=self.address)

    def request_stop(self) -> None:
        """Ask for the stop that ``wait_for_stop`` waits for."""
        self._stop_requested.set()

    async def wait_for_stop(self) -> None:
        """Return on SIGTERM, SIGINT or ``request_stop``. No deadline: a service runs until stopped."""
        await self._stop_requested.wait()

    def _heed_signals(self) -> None:
        """From the first answer on, so that no signal ends the process uncleanly; a thread's loop cannot."""
        if threading.current_thread() is threading.main_thread():
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._stop_requested.set)

    async def stop(self, grace_s: float = GRACE_S) -> None:
        """Say NOT_SERVING, refuse new calls, end long streams, let running calls end within the grace, close."""
        self._status.state = "stopping"
        await self._health.enter_graceful_shutdown()
        closing = asyncio.ensure_future(self._server.stop(grace_s))
        await asyncio.sleep(0)  # its first step refuses new calls
        failures: list[Exception] = []
        callbacks, self._on_stop = self._on_stop, []  # stopping twice does no harm
        for callback in callbacks:
            try:
                if (pending := callback()) is not None:
                    async with deadline(STOP_CALLBACK_S, f"{self.service}: ending the streams of {callback!r}"):
                        await pending
            except Exception as error:
                log.exception("server.stop_callback_failed", service=self.service)
                failures.append(error)  # raised below: the stop goes on
        await closing
        if failures:
            raise failures[0]
        log.info("server.stopped", service=self.service)

    async def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for name in ("", *self._names):
            await self._health.set(name, status)


_IN_USE = "the port is in use"
_WAS_IN_USE = "the port was in use a moment ago"
_KEEP: set[asyncio.Future[None]] = set()  # asyncio holds tasks weakly


class _ByName:
    """Collects the methods of a servicer by name.

    Methods that are registered one by one have a pending call each, and grpc.aio waits for all of them anew at every
    call: with a dozen methods that costs more than a short call itself.
    """

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        self._server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(self, service: str, handlers: object) -> None:
        """They are among the generic ones."""


class _StatusServicer(status_pb2_grpc.StatusServiceServicer):
    def __init__(self, service: str, instance_id: str, run_id: str) -> None:
        self._service = service
        self._instance_id = instance_id
        self._started_at = time.time()
        self.run_id = run_id
        self.state = "starting"
        self.gauges: Gauges = dict
        self.labels: Labels = dict
        self.accounts: Accounts = tuple

    def now(self) -> ProcessStatus:
        return ProcessStatus(
            service=self._service,
            instance_id=self._instance_id,
            run_id=self.run_id,
            state=self.state,
            started_at=self._started_at,
            gauges=dict(self.gauges()),
            labels=dict(self.labels()),
            accounts=tuple(self.accounts()),
        )

    async def GetStatus(
        self, request: status_pb2.GetStatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> status_pb2.GetStatusResponse:
        return write(self.now(), status_pb2.GetStatusResponse())


def _why_not(host: str, port: int) -> str:
    """Why a bind fails, in the words of the system."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
        except OSError as error:
            return _IN_USE if error.errno == errno.EADDRINUSE else str(error.strerror)
    return _WAS_IN_USE
