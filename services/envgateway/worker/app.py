"""Wiring of a worker: sandbox, judge, Redis, and the signals that end it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket

from services.envgateway.judge.judge import Judge
from services.envgateway.queue.base import LocalRunner
from services.envgateway.queue.streams.connection import connect
from services.envgateway.queue.streams.names import Names
from services.envgateway.sandbox.pool import SandboxPool
from services.envgateway.worker.settings import WorkerSettings
from services.envgateway.worker.worker import Worker

_DRAIN_GRACE_S = 5.0


async def work(settings: WorkerSettings, sandbox: SandboxPool) -> None:
    """Take jobs until SIGTERM or SIGINT, then let what runs end.

    Raises:
        ConfigError: a URI that cannot be used.
    """
    client = connect(settings.redis_uri, settings.queue.allow_plain_redis)
    worker = Worker(
        client,
        Names(settings.queue.redis_prefix),
        LocalRunner(sandbox, Judge(sandbox)),
        num_slots=settings.sandbox.num_slots,
        lease_s=settings.queue.lease_s,
        max_attempts=settings.queue.max_attempts,
        about={"tier": sandbox.tier, "host": socket.gethostname(), "pid": str(os.getpid())},
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, worker.stop)
    try:
        await worker.run(drain_s=settings.sandbox.wall_time_s + _DRAIN_GRACE_S)
    finally:
        await sandbox.close()
        await client.aclose()
