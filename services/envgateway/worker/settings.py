"""Settings of a worker, from a recipe's section and from variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from services.common.config.processes.envgateway import EnvGatewayConfig, QueueConfig, SandboxConfig
from services.common.errors import ConfigError
from services.envgateway.variables import with_variables


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    redis_uri: str
    queue: QueueConfig
    sandbox: SandboxConfig


def worker_settings(config: EnvGatewayConfig | None, environment: Mapping[str, str] = os.environ) -> WorkerSettings:
    """Settings from a recipe's section (None: Code Judge's defaults) and variables."""
    told, redis_uri = with_variables(config, environment)
    if not redis_uri:
        raise ConfigError("a worker needs a Redis: set REDIS_URI=redis://127.0.0.1:6379, or envgateway.queue.redis_uri")
    # Live processes belong to episodes, which the gateway holds.
    sandbox = told.sandbox.model_copy(update={"num_live": 0})
    return WorkerSettings(redis_uri=redis_uri, queue=told.queue, sandbox=sandbox)
