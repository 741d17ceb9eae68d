"""Waiting for the orchestrator from wherever a process is started, and saying what is in the way.

A name that nobody knows and keys that do not fit are told at once; a machine that does not answer, after
``launch.ready_timeout_s``; one that answers but has no orchestrator yet is waited for as long as starting checkpoints may take.
"""

from __future__ import annotations

import socket
import time

from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.console import Console

from services.common.errors import AccessError, ConfigError, DeadlineError, InfrastructureError, MillraceError
from services.common.hosts import host_and_port
from services.common.rpc.health import HEALTH_DEADLINE_S
from services.common.rpc.status import translated_errors
from services.common.rpc.sync_channel import sync_channel
from services.common.security import handshake, identity
from services.common.security.roles import Peer

ORCHESTRATOR_WAIT_S = 3600.0
CONNECT_S = 3.0
POLL_S = 0.5
TELL_S = 30.0


def wait_for_orchestrator(place: str, silent_s: float, console: Console, wait_s: float = ORCHESTRATOR_WAIT_S) -> None:
    """Until the orchestrator at ``HOST:PORT`` says SERVING; others may be started before it.

    Raises:
        ConfigError: nobody knows the name of the host.
        AccessError: our keys, or those of who answers, are of another run, or not valid now.
        InfrastructureError: no machine answered at that address for ``silent_s``.
        DeadlineError: one does, but no orchestrator answered there within ``wait_s``.
    """
    begun = heard_at = time.monotonic()
    told_at: float | None = None
    while not _is_ready(place):
        obstacle, is_silent = _obstacle(place)
        now = time.monotonic()
        if not is_silent:
            heard_at = now
        elif now - heard_at > silent_s:
            raise InfrastructureError(
                f"{obstacle}, for {now - heard_at:.0f} s: is node 0 up, is the address right, and does every firewall between "
                "let the port through? (docs/deploy.md lists the ports)"
            )
        if now - begun > wait_s:
            raise DeadlineError(
                f"the orchestrator at {place} did not answer within {wait_s:g} s ({obstacle}): is it running, and is the "
                "address right? (deploy/launch/2_orchestrator.sh RECIPE)"
            )
        if told_at is None or now - told_at > TELL_S:
            console.print(
                f"waiting for the orchestrator at {place}: {obstacle}", highlight=False, soft_wrap=True, markup=False
            )
            told_at = now
        time.sleep(POLL_S)


def _is_ready(place: str) -> bool:
    """Whether the orchestrator says SERVING. Raises ``AccessError`` when it does not take us in."""
    with sync_channel(place, Peer.ORCHESTRATOR) as channel:
        try:
            with translated_errors(f"orchestrator {place}"):
                answer = health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(), timeout=HEALTH_DEADLINE_S
                )
        except AccessError:
            raise
        except MillraceError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _obstacle(place: str) -> tuple[str, bool]:
    """What is in the way, and whether the machine is silent. Raises what waiting does not mend."""
    host, port = host_and_port(place)
    try:
        socket.create_connection((host, port), CONNECT_S).close()
    except socket.gaierror as error:
        raise ConfigError(
            f"nobody here knows the name {host} ({error.strerror}): write a name or address of node 0 that this machine knows"
        ) from None
    except ConnectionRefusedError:
        return f"nothing listens at {place} yet", False
    except TimeoutError:
        return f"no answer from {host} at port {port}", True
    except OSError as error:
        return f"{host} cannot be reached: {error.strerror}", True
    refusal = handshake.refusal_now(place, identity.current(), Peer.ORCHESTRATOR)
    if refusal is not None:
        raise refusal
    return f"something answers at {place}, but no orchestrator that is ready", False
