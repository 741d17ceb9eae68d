"""Waits until the orchestrator is ready, and reports the obstacle meanwhile.

An unknown host name and wrong keys fail at once; a machine that does not answer fails after ``launch.ready_timeout_s``.
If the machine answers without an orchestrator, the wait lasts as long as starting checkpoints may take.
"""

from __future__ import annotations

import socket
import time

from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.console import Console

from services.cli.console import say
from services.common.errors import AccessError, ConfigError, DeadlineError, InfrastructureError, RollmillError
from services.common.net.hosts import host_and_port
from services.common.rpc.client.channel import translated_errors
from services.common.rpc.client.health import HEALTH_DEADLINE_S
from services.common.rpc.credentials import sync_channel
from services.common.security import handshake, identity
from services.common.security.roles import Peer

ORCHESTRATOR_WAIT_S = 3600.0
CONNECT_S = 3.0
POLL_S = 0.5
REPORT_S = 30.0


def wait_for_orchestrator(place: str, silent_s: float, console: Console, wait_s: float = ORCHESTRATOR_WAIT_S) -> None:
    """Wait until the orchestrator at ``HOST:PORT`` reports SERVING; other processes may start before it.

    Raises:
        ConfigError: the host name cannot be resolved.
        AccessError: our keys or the peer's keys belong to another run, or are not valid now.
        InfrastructureError: no machine answered at that address for ``silent_s``.
        DeadlineError: a machine answers, but no orchestrator is ready there within ``wait_s``.
    """
    begun = answered_at = time.monotonic()
    reported_at: float | None = None
    while not _is_ready(place):
        obstacle, is_silent = _obstacle(place)
        now = time.monotonic()
        if not is_silent:
            answered_at = now
        elif now - answered_at > silent_s:
            raise InfrastructureError(
                f"{obstacle}, for {now - answered_at:.0f} s: is node 0 up, is the address right, and does every firewall between "
                "let the port through? (docs/deploy.md lists the ports)"
            )
        if now - begun > wait_s:
            raise DeadlineError(
                f"the orchestrator at {place} did not answer within {wait_s:g} s ({obstacle}): is it running, and is the "
                "address right? (deploy/launch/2_orchestrator.sh RECIPE)"
            )
        if reported_at is None or now - reported_at > REPORT_S:
            say(console, f"waiting for the orchestrator at {place}: {obstacle}")
            reported_at = now
        time.sleep(POLL_S)


def _is_ready(place: str) -> bool:
    """Whether the orchestrator reports SERVING. Raises ``AccessError`` when our keys are rejected."""
    with sync_channel(place, Peer.ORCHESTRATOR) as channel:
        try:
            with translated_errors(f"orchestrator {place}"):
                answer = health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(), timeout=HEALTH_DEADLINE_S
                )
        except AccessError:
            raise
        except RollmillError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _obstacle(place: str) -> tuple[str, bool]:
    """The obstacle, and whether the machine does not answer. Raises errors that waiting cannot fix."""
    host, port = host_and_port(place)
    try:
        socket.create_connection((host, port), CONNECT_S).close()
    except socket.gaierror as error:
        raise ConfigError(
            f"this machine cannot resolve the name {host} ({error.strerror}): write a name or address of node 0 that it can"
        ) from None
    except ConnectionRefusedError:
        return f"no process listens at {place} yet", False
    except TimeoutError:
        return f"no answer from {host} at port {port}", True
    except OSError as error:
        return f"{host} cannot be reached: {error.strerror}", True
    refusal = handshake.refusal_now(place, identity.current(), Peer.ORCHESTRATOR)
    if refusal is not None:
        raise refusal
    return f"a server answers at {place}, but no orchestrator that is ready", False
