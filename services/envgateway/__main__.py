"""``python -m services.envgateway``: the sandbox first, then everything that starts threads."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from services.common import logs
from services.common.config.envgateway import EnvGatewayConfig
from services.common.config.loading import load_recipe, load_resolved
from services.common.errors import ConfigError, MillraceError
from services.common.process import die_with_parent_if_asked
from services.common.security import identity
from services.common.security.roles import Role
from services.envgateway.sandbox.pool import SandboxPool
from services.envgateway.variables import VARIABLES, port_variables, with_variables

_DESCRIPTION = """\
Serve environments, sandboxed code execution and rewards, as a recipe's `envgateway` says; without a recipe as a judge
with the settings that users of Code Judge know. With REDIS_URI (or envgateway.queue.redis_uri) programs run at workers:
python -m services.envgateway.worker. With envgateway.http.port clients of Code Judge are served as well.

  python -m services.envgateway --recipe recipes/quickstart
  CODE_JUDGE_PORT=8000 MAX_EXECUTION_TIME=4 REDIS_URI=redis://127.0.0.1:6379 python -m services.envgateway
"""
_PORTS = """\
  ENVGATEWAY_PORT     gRPC (50080)
  CODE_JUDGE_PORT     the HTTP interface of Code Judge (none)
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m services.envgateway",
        description=_DESCRIPTION,
        epilog=VARIABLES + _PORTS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--run-dir", type=Path, help="a run directory, as the launcher makes it")
    source.add_argument("--recipe", type=Path, help="a recipe: serve without a run")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="a.b=c",
                        help="with --recipe: override a setting")  # fmt: skip
    parser.add_argument("--share-http-port", action="store_true",
                        help="other gateways on this host serve the same HTTP port (envgateway.http.reuse_port)")  # fmt: skip
    arguments = parser.parse_args()
    die_with_parent_if_asked()
    try:
        config, run_id, redis_uri = _told(arguments)
        logs.configure("envgateway", arguments.run_dir)
        sandbox = SandboxPool.start_before_threads(config.sandbox)
        identity.configure(Role.ENVGATEWAY)  # only now: what the sandbox was forked from has read no keys
        from services.envgateway.app import serve  # grpc, and with it threads, only now

        asyncio.run(serve(config, sandbox, run_id, redis_uri))
    except MillraceError as error:
        sys.exit(f"error: {error.message}")


def _told(arguments: argparse.Namespace) -> tuple[EnvGatewayConfig, str, str]:
    """The settings, the id of the run, and the URI of Redis."""
    section, run_id = None, ""
    if arguments.run_dir is not None or arguments.recipe is not None:
        if arguments.run_dir is not None:
            recipe = load_resolved(arguments.run_dir)
        else:
            recipe = load_recipe(arguments.recipe, arguments.overrides)
        if recipe.envgateway is None:
            raise ConfigError("the recipe has no gateway: write envgateway: {}")
        section, run_id = recipe.envgateway, recipe.run.id or ""
    config, redis_uri = with_variables(section)
    if section is None:
        config = EnvGatewayConfig.model_validate(config.model_dump() | port_variables())
        if redis_uri:  # then programs run at workers, and nothing but programs is asked for
            few = config.sandbox.model_copy(update={"num_slots": 1, "num_live": 0, "prewarm_scientific": False})
            config = config.model_copy(update={"sandbox": few})
    if arguments.share_http_port:
        config = config.model_copy(update={"http": config.http.model_copy(update={"reuse_port": True})})
    return config, run_id, redis_uri


if __name__ == "__main__":
    main()
