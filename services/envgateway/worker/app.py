"""Wiring of a worker: sandbox, judge, Redis, and the signals that end the worker."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from pathlib import Path

from services.common.config.processes.services import MetricsConfig
from services.common.prometheus import metrics_server
from services.common.telemetry.status import ProcessStatus
from services.envgateway.judge.judge import Judge
from services.envgateway.prometheus import WORKER_METRICS
from services.envgateway.queue.base import LocalRunner
from services.envgateway.queue.streams.connection import connect
from services.envgateway.queue.streams.names import Names
from services.envgateway.rewards.math.pool import comparisons
from services.envgateway.sandbox.pool import SandboxPool
from services.envgateway.variables import WorkerSettings
from services.envgateway.worker.worker import Worker

_DRAIN_GRACE_S = 5.0


async def work(
    settings: WorkerSettings,
    sandbox: SandboxPool,
    *,
    metrics: MetricsConfig | None = None,
    run_id: str = "",
    run_dir: Path | None = None,
) -> None:
    """Take jobs until SIGTERM or SIGINT, then let running jobs end. Metrics are served on loopback.

    Raises:
        ConfigError: a URI that cannot be used.
    """
    client = connect(settings.redis_uri, settings.queue.allow_plain_redis)
    apart = comparisons()
    worker = Worker(
        client,
        Names(settings.queue.redis_prefix),
        LocalRunner(sandbox, Judge(sandbox, apart.failure)),
        num_slots=settings.sandbox.num_slots,
        lease_s=settings.queue.lease_s,
        max_attempts=settings.queue.max_attempts,
        about={"tier": sandbox.tier, "host": socket.gethostname(), "pid": str(os.getpid())},
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, worker.stop)
    started_at = time.time()

    def status() -> ProcessStatus:
        return ProcessStatus(
            service="worker",
            instance_id=worker.name,
            run_id=run_id,
            state="ready",
            started_at=started_at,
            gauges=worker.gauges,
        )

    served = metrics_server(
        metrics or MetricsConfig(), status, WORKER_METRICS, name="worker", host="127.0.0.1", run_dir=run_dir
    )
    try:
        if served is not None:
            await served.start()
        await worker.run(drain_s=settings.sandbox.wall_time_s + _DRAIN_GRACE_S)
    finally:
        if served is not None:
            await served.stop()
        await apart.close()
        await sandbox.close()
        await client.aclose()
