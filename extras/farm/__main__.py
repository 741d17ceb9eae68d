"""``python -m extras.farm``: starts the sandbox first, then Redis and other parts with threads."""

from __future__ import annotations

import asyncio
import os
import sys

from services.common.config.reading.unread import unread_variables
from services.common.errors import ConfigError, RollmillError
from services.common.system.child import die_with_parent_if_asked
from services.common.telemetry import logs
from services.envgateway.sandbox.pool import SandboxPool
from services.envgateway.variables import parser_of, recipe_of, with_variables

_DESCRIPTION = """\
Run programs for environment gateways, in a sandbox on this node. Gateway and workers meet in one Redis only; start as
many workers as you like, on as many nodes as you like, and stop or kill them at any moment: their jobs go to others.

  REDIS_URI=redis://127.0.0.1:6379 MAX_WORKERS=64 MAX_EXECUTION_TIME=4 python -m extras.farm

SIGTERM: take no more jobs, finish running jobs, give back the rest. kill -9: others take over its jobs after lease_s.
Where Redis is away the worker waits for it, for ever; it ends by itself only over settings that cannot work.
"""


def main() -> None:
    arguments = parser_of("python -m extras.farm", _DESCRIPTION).parse_args()
    die_with_parent_if_asked()
    try:
        recipe = recipe_of(arguments)
        config, redis_uri = with_variables(recipe.envgateway if recipe else None)
        if not redis_uri:
            raise ConfigError(
                "a worker needs a Redis: set REDIS_URI=redis://127.0.0.1:6379, or envgateway.queue.redis_uri"
            )
        # Live processes belong to episodes, which the gateway holds.
        limits = config.sandbox.model_copy(update={"num_live": 0})
        logs.configure("envgateway", arguments.run_dir, instance=f"worker-{os.getpid()}")
        for sentence in unread_variables(None, os.environ):
            sys.stderr.write(f"warning: {sentence}\n")
        sandbox = SandboxPool.start_before_threads(limits)
        from extras.farm.worker import work  # redis and asyncio, and with them threads, only now

        metrics, run_id = (recipe.metrics, recipe.run.id or "") if recipe else (None, "")
        asyncio.run(work(redis_uri, config.queue, sandbox, metrics=metrics, run_id=run_id, run_dir=arguments.run_dir))
    except RollmillError as error:
        sys.exit(f"error: {error.message}")


if __name__ == "__main__":
    main()
