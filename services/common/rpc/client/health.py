"""Asks a service whether it is ready; ``python -m services.common.rpc.client.health HOST:PORT`` exits with 0 when
ready.

Containers use the command as health check; the launcher asks in the same way. If ``ROLLMILL_KEYS`` names keys, those of
the checked process suffice.
"""

from __future__ import annotations

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.errors import ConfigError
from services.common.rpc.credentials import sync_channel
from services.common.security import identity
from services.common.security.roles import SERVICES, Role

HEALTH_DEADLINE_S = 2.0


def is_serving(address: str) -> bool:
    """Whether the health service at ``HOST:PORT`` says SERVING within ``HEALTH_DEADLINE_S``."""
    with sync_channel(address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=HEALTH_DEADLINE_S
            )
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def identify() -> None:
    """Ask with the keys that ``ROLLMILL_KEYS`` names, of any role. Raises ``ConfigError`` for unusable ones."""
    identity.configure(*sorted(SERVICES, key=lambda role: role.value), Role.OPERATOR, Role.VIEWER)


def main(arguments: list[str]) -> int:
    """0: every address says SERVING; 1: one does not; 2: no address was given, or the keys cannot be used."""
    if not arguments:
        sys.stderr.write("usage: python -m services.common.rpc.client.health HOST:PORT ...\n")
        return 2
    try:
        identify()
    except ConfigError as error:
        sys.stderr.write(f"{error.message}\n")
        return 2
    silent = [address for address in arguments if not is_serving(address)]
    sys.stderr.writelines(f"{address} does not say SERVING\n" for address in silent)
    return 1 if silent else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
