"""Ask a service whether it is ready; ``python -m services.common.rpc.health HOST:PORT`` exits with 0 when it is.

The command is what containers are checked with: the same question that the launcher asks.
"""

from __future__ import annotations

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

HEALTH_DEADLINE_S = 2.0


def is_serving(address: str) -> bool:
    """Whether the health service at ``HOST:PORT`` says SERVING within ``HEALTH_DEADLINE_S``."""
    with grpc.insecure_channel(address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=HEALTH_DEADLINE_S
            )
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def main(arguments: list[str]) -> int:
    """0: every address says SERVING; 1: one does not; 2: no address was given."""
    if not arguments:
        sys.stderr.write("usage: python -m services.common.rpc.health HOST:PORT ...\n")
        return 2
    silent = [address for address in arguments if not is_serving(address)]
    sys.stderr.writelines(f"{address} does not say SERVING\n" for address in silent)
    return 1 if silent else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
