"""``python -m services.envgateway``: the sandbox first, then everything that starts threads."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path

from services.common import logs
from services.common.config.loading import load_recipe, load_resolved
from services.common.errors import ConfigError, MillraceError
from services.common.process import die_with_parent_if_asked
from services.envgateway.sandbox.pool import SandboxPool


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m services.envgateway",
        description="Serve environments, sandboxed code execution and rewards, as a recipe's `envgateway` says. With "
        "REDIS_URI (or envgateway.queue.redis_uri) programs run at workers: python -m services.envgateway.worker. With "
        "envgateway.http.port clients of Code Judge are served as well.",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--run-dir", type=Path, help="a run directory, as the launcher makes it")
    source.add_argument("--recipe", type=Path, help="a recipe: serve without a run")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="a.b=c",
                        help="with --recipe: override a setting")  # fmt: skip
    arguments = parser.parse_args()
    die_with_parent_if_asked()
    try:
        if arguments.run_dir is not None:
            recipe = load_resolved(arguments.run_dir)
        else:
            recipe = load_recipe(arguments.recipe, arguments.overrides)
        if recipe.envgateway is None:
            raise ConfigError("the recipe has no gateway: write envgateway: {}")
        logs.configure("envgateway", arguments.run_dir)
        sandbox = SandboxPool.start_before_threads(recipe.envgateway.sandbox)
        from services.envgateway.app import serve  # grpc, and with it threads, only now

        # The variable rather than the recipe: a password in it is then not saved with the run.
        asyncio.run(serve(recipe.envgateway, sandbox, recipe.run.id or "", os.environ.get("REDIS_URI") or None))
    except MillraceError as error:
        sys.exit(f"error: {error.message}")


if __name__ == "__main__":
    main()
