"""What a worker is told: the variables that users of Code Judge know, over a recipe's section where one is given."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from services.common.config.envgateway import EnvGatewayConfig, QueueConfig, SandboxConfig
from services.common.errors import ConfigError

VARIABLES = """\
variables (over what a recipe says):
  REDIS_URI           where jobs wait: redis://HOST:PORT, rediss://HOST:PORT (TLS), unix:///path (no default)
  MAX_WORKERS         programs run at once (number of CPUs)
  MAX_EXECUTION_TIME  seconds that one program may run, wall clock and CPU (10)
  MAX_MEMORY          MiB that one program and its children may use (512)
  REDIS_KEY_PREFIX    begins every key; the gateway's envgateway.queue.redis_prefix (millrace)
  ALLOW_PLAIN_REDIS   1: use a Redis on another machine without TLS
  ALLOW_TIER_0        1: run programs without isolation where none works; trusted code only
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    redis_uri: str
    queue: QueueConfig
    sandbox: SandboxConfig


def worker_settings(config: EnvGatewayConfig | None, environment: Mapping[str, str] = os.environ) -> WorkerSettings:
    """From a recipe's section (None: Code Judge's defaults) and variables.

    Raises:
        ConfigError: a variable that is not a number, or no REDIS_URI.
    """
    defaults = {"num_slots": os.cpu_count() or 1, "wall_time_s": 10.0, "cpu_time_s": 10.0}
    sandbox = (config.sandbox if config else SandboxConfig()).model_dump() | ({} if config else defaults)
    queue = (config.queue if config else QueueConfig()).model_dump()
    sandbox["num_live"] = 0  # live processes belong to episodes, which the gateway holds
    if (slots := _number(environment, "MAX_WORKERS", int)) is not None:
        sandbox["num_slots"] = slots
    if (seconds := _number(environment, "MAX_EXECUTION_TIME", float)) is not None:
        sandbox["wall_time_s"] = sandbox["cpu_time_s"] = seconds
    if (mebibytes := _number(environment, "MAX_MEMORY", int)) is not None:
        sandbox["memory_bytes"] = int(mebibytes) << 20
    if _flag(environment, "ALLOW_TIER_0"):
        sandbox["allow_tier_0"] = True
    if _flag(environment, "ALLOW_PLAIN_REDIS"):
        queue["allow_plain_redis"] = True
    queue["redis_prefix"] = environment.get("REDIS_KEY_PREFIX") or queue["redis_prefix"]
    redis_uri = environment.get("REDIS_URI") or queue["redis_uri"]
    if not redis_uri:
        raise ConfigError("a worker needs a Redis: set REDIS_URI=redis://127.0.0.1:6379, or envgateway.queue.redis_uri")
    return WorkerSettings(
        redis_uri=redis_uri,
        queue=QueueConfig.model_validate(queue),
        sandbox=SandboxConfig.model_validate(sandbox),
    )


def _number(environment: Mapping[str, str], name: str, kind: Callable[[str], float]) -> float | None:
    text = environment.get(name)
    if not text:
        return None
    try:
        value = kind(text)
    except ValueError:
        value = 0
    if not value > 0:
        raise ConfigError(f"the variable {name} is {text!r}; it must be a number above 0")
    return value


def _flag(environment: Mapping[str, str], name: str) -> bool:
    text = environment.get(name, "").lower()
    if text not in ("", "0", "1", "false", "true"):
        raise ConfigError(f"the variable {name} is {text!r}; it must be 0 or 1")
    return text in ("1", "true")
