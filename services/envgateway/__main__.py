"""``python -m services.envgateway``: the sandbox first, then everything that starts threads."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from typing import NamedTuple

from services.common.config.envgateway import EnvGatewayConfig
from services.common.config.processes import MetricsConfig
from services.common.config.reading.unread import unread_variables
from services.common.errors import DeadlineError, InfrastructureError, RollmillError
from services.common.extras import provided
from services.common.security import identity
from services.common.security.identity import check_keys_are_there
from services.common.security.keys import Role
from services.common.system.child import START_AGAIN, die_with_parent_if_asked, module_command
from services.common.telemetry import logs
from services.common.telemetry.logs import settle
from services.envgateway.sandbox.pool import SandboxPool
from services.envgateway.variables import VARIABLES, parser_of, port_variables, recipe_of, runs_worker, with_variables

_DESCRIPTION = """\
Serve environments, sandboxed code execution and rewards, as a recipe's `envgateway` says; without a recipe as a judge
with the settings that users of Code Judge know. With REDIS_URI (or envgateway.queue.redis_uri) programs run at workers:
python -m extras.farm. With envgateway.http.port clients of Code Judge are served as well.

  python -m services.envgateway --recipe recipes/quickstart
  CODE_JUDGE_PORT=8000 MAX_EXECUTION_TIME=4 REDIS_URI=redis://127.0.0.1:6379 python -m services.envgateway
"""
_PORTS = """\
  ENVGATEWAY_PORT     gRPC (50080)
  CODE_JUDGE_PORT     the HTTP interface of Code Judge (none)
"""


def main() -> None:
    parser = parser_of("python -m services.envgateway", _DESCRIPTION, VARIABLES + _PORTS)
    parser.add_argument("--orchestrator", metavar="HOST:PORT",
                        help="serve the run of this orchestrator, until it has ended; left out, serve until SIGTERM")  # fmt: skip
    parser.add_argument("--host", help="bind this address instead of the recipe's")
    parser.add_argument("--share-http-port", action="store_true",
                        help="other gateways on this host serve the same HTTP port (envgateway.http.reuse_port)")  # fmt: skip
    arguments = parser.parse_args()
    die_with_parent_if_asked()
    settle()
    try:
        settings = _settings(arguments)
        logs.configure("envgateway", arguments.run_dir)
        # with a run directory the launcher has shown them
        for sentence in unread_variables(None, os.environ) if arguments.run_dir is None else ():
            sys.stderr.write(f"warning: {sentence}\n")
        sandbox = SandboxPool.start_before_threads(settings.config.sandbox, is_optional=settings.runs_none)
        # Only now: the sandbox's processes were started before any key was read.
        check_keys_are_there(settings.needs_keys, identity.configure(Role.ENVGATEWAY))
        from services.envgateway.app import serve  # grpc starts threads, so the import comes after the sandbox's start

        asyncio.run(
            serve(
                settings.config,
                sandbox,
                settings.run_id,
                settings.redis_uri,
                metrics=settings.metrics,
                run_dir=arguments.run_dir,
                orchestrator=arguments.orchestrator,
                worker=settings.worker,
            )
        )
    except (InfrastructureError, DeadlineError) as error:
        sys.stderr.write(f"error: {error.message}\n")
        sys.exit(START_AGAIN)
    except RollmillError as error:
        sys.exit(f"error: {error.message}")


class _Settings(NamedTuple):
    """Settings from arguments, recipe and variables, combined."""

    config: EnvGatewayConfig
    run_id: str = ""
    redis_uri: str = ""
    needs_keys: bool = False
    metrics: MetricsConfig = MetricsConfig()
    worker: tuple[str, ...] = ()  # the command of the worker that it starts
    runs_none: bool = False  # of its programs, as far as is known: a gateway without a sandbox does


def _settings(arguments: argparse.Namespace) -> _Settings:
    section, run_id, needs_keys, metrics, runs_none = None, "", False, MetricsConfig(), False
    if (recipe := recipe_of(arguments)) is not None:
        section, run_id, metrics = recipe.envgateway, recipe.run.id or "", recipe.metrics
        needs_keys, runs_none = recipe.needs_keys, recipe.where_programs_run() is None
    config, redis_uri = with_variables(section)
    if section is None:
        config = EnvGatewayConfig.model_validate(config.model_dump() | port_variables())
        if redis_uri:  # programs run at workers then, and this process runs nothing else for them
            few = config.sandbox.model_copy(update={"num_slots": 1, "num_live": 0, "prewarm_scientific": False})
            config = config.model_copy(update={"sandbox": few})
    http = config.extra("http")
    if arguments.share_http_port and http is not None:
        config = config.model_copy(update={"http": http.model_copy(update={"reuse_port": True})})
    if arguments.host:
        config = config.model_copy(update={"host": arguments.host})
    given = {"--run-dir": arguments.run_dir, "--recipe": arguments.recipe}
    source = [str(part) for option in given.items() if option[1] is not None for part in option]
    source += [part for override in arguments.overrides for part in ("--set", override)]
    module = provided("workers")["redis"].partition(":")[0] if runs_worker() and redis_uri else ""
    worker = module_command(module, *source) if module else ()
    runs_none = (runs_none and (http is None or http.port is None)) or bool(redis_uri)
    return _Settings(config, run_id, redis_uri, needs_keys, metrics, worker, runs_none)


if __name__ == "__main__":
    main()
