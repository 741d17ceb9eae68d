"""Waiting for the orchestrator from wherever a process is started, and saying what is in the way.

A name that nobody knows is told at once; a machine that does not answer, after ``launch.ready_timeout_s``; one that
answers but has no orchestrator yet is waited for as long as starting checkpoints may take.
"""

from __future__ import annotations

import socket
import time

from rich.console import Console

from services.common.errors import ConfigError, DeadlineError, InfrastructureError
from services.common.hosts import host_of
from services.common.rpc.health import is_serving

ORCHESTRATOR_WAIT_S = 3600.0
CONNECT_S = 3.0
POLL_S = 0.5
TELL_S = 30.0


def wait_for_orchestrator(place: str, silent_s: float, console: Console, wait_s: float = ORCHESTRATOR_WAIT_S) -> None:
    """Until the orchestrator at ``HOST:PORT`` says SERVING; others may be started before it.

    Raises:
        ConfigError: nobody knows the name of the host.
        InfrastructureError: no machine answered at that address for ``silent_s``.
        DeadlineError: one does, but no orchestrator answered there within ``wait_s``.
    """
    begun = heard_at = time.monotonic()
    told_at: float | None = None
    while not is_serving(place):
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


def _obstacle(place: str) -> tuple[str, bool]:
    """What is in the way, and whether the machine is silent. Raises ``ConfigError`` for a name that nobody knows."""
    host, port = host_of(place), int(place.rpartition(":")[2])
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
    return f"something answers at {place}, but no orchestrator that is ready", False
