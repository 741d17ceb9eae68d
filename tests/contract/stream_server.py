"""A server process for the signal tests: prints its port; its streams go on when the stop begins."""

from __future__ import annotations

import asyncio
import sys

from services.common.telemetry import logs
from tests.contract.run_servicer import RunServicer, make_server


async def main() -> None:
    logs.configure(service="test")  # to standard error: the port goes to standard output
    servicer = RunServicer()
    server = make_server(servicer)
    await server.start()
    server.on_stop(servicer.release.set)
    stopped = asyncio.ensure_future(server.wait_for_stop())
    await asyncio.sleep(0)  # the signal handlers are set before anybody knows the port
    sys.stdout.write(f"{server.port}\n")
    sys.stdout.flush()
    await stopped
    await server.stop(grace_s=20.0)


if __name__ == "__main__":
    asyncio.run(main())
